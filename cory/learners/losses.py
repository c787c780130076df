"""The learners' arithmetic on (batch, R) tensors of a response window: log-probabilities, KL, advantages, losses."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cory.algorithms import GROUP_ALGORITHMS
from cory.parallel import distributed


class TokenLogprobs(torch.autograd.Function):
    """Log-softmax and the log-probabilities of the chosen tokens, in one array of the vocabulary's
    size.

    `apply(logits (..., V), ids (...), temperature)` returns `logprobs (...)`, which carry the
    gradient, and `all_logprobs (..., V)` for entropy and KL, which do not; both of the distribution
    from which tokens are drawn at that temperature. Autograd's own backward pass would make two more
    arrays of that size; it takes no longer.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """See the class."""
        if temperature != 1.0:
            logits = logits / temperature
        all_logprobs = logits.log_softmax(-1)
        ctx.temperature = temperature
        ctx.save_for_backward(all_logprobs, ids)
        ctx.mark_non_differentiable(all_logprobs)
        ctx.set_materialize_grads(False)  # no array of zeros for it
        return all_logprobs.gather(-1, ids[..., None]).squeeze(-1), all_logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        """`d log p(chosen) / d logits = (onehot(chosen) - p) / temperature`."""
        if grads[0] is None:
            return None, None, None
        all_logprobs, ids = ctx.saved_tensors
        grad = grads[0][..., None] / ctx.temperature
        return all_logprobs.exp().mul_(-grad).scatter_add_(-1, ids[..., None], grad), None, None


@torch.no_grad()
def entropy(logprobs: Tensor, rows: int) -> Tensor:
    """Entropy in nats at every position: (batch, R, vocabulary) to (batch, R), `rows` of the batch at a time."""
    return torch.cat([-part.exp().mul_(part).sum(-1) for part in logprobs.split(rows)])


def token_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Eq. 2: `-eta * KL` at every response token, plus the training reward at the last one.

    Args:
        rewards: (batch,) training rewards.
        kl, mask: (batch, R), the KL of each response token, and 1 where there is one.
        kl_coef: eta.

    Returns (batch, R) rewards.
    """
    penalties = -kl_coef * kl
    last_token = mask.sum(1, keepdim=True) - 1
    return penalties.scatter_add(1, last_token, rewards[:, None].to(penalties.dtype))  # Eq. 2


def mean_and_variance(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (0 of one) of the (batch, R) values that the mask keeps, over all processes."""
    total, count = distributed.all_reduce_sum(torch.stack([(x * mask).sum(), mask.sum()]))
    mean = total / count
    return mean, distributed.all_reduce_sum(((x - mean).square() * mask).sum()) / (count - 1).clamp(
        min=1
    )


def all_alike(rewards: Tensor) -> bool:
    """Whether (batch,) rewards are equal, over all processes."""
    largest = distributed.all_reduce_max(rewards.max().item())
    return largest == -distributed.all_reduce_max(-rewards.min().item())


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shifts and scales the (batch, R) values that the mask keeps to mean 0 and variance 1."""
    mean, variance = mean_and_variance(x, mask)
    return (x - mean) * torch.rsqrt(variance + 1e-8)


def gae(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    scores_alike: bool = False,
) -> tuple[Tensor, Tensor]:
    """GAE (Eq. 12), whitened over the response tokens of all processes together; TRL whitens within
    each process.

    `scores_alike`: all responses earn the same, so that token rewards differ by the KL alone. Advantages are then
    centred but not scaled: that would blow up the noise of a small KL to the size of a reward.

    Returns advantages and returns; all tensors, given or returned, are (batch, R).
    """
    values = values * mask
    rewards = rewards * mask

    advantages = torch.zeros_like(values)
    advantage = torch.zeros_like(values[:, 0])
    next_values = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        advantage = delta + gamma * lam * advantage  # Eq. 12
        advantages[:, t] = advantage
        next_values = values[:, t]
    returns = advantages + values
    if scores_alike:
        return advantages - mean_and_variance(advantages, mask)[0], returns
    return whiten(advantages, mask), returns


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """`1 - Var(R - V) / Var(R)` over the response tokens of all processes; all tensors (batch, R).

    1: the critic foretells the returns. 0: no better than their mean. NaN where the returns do not
    vary.
    """
    _, variance = mean_and_variance(returns, mask)
    _, unexplained = mean_and_variance(returns - values, mask)
    return torch.where(variance > 0, 1 - unexplained / variance, math.nan)


class LossTerms(NamedTuple):
    """What is minimized, and the statistics beside it: scalar tensors, sums over response tokens or
    some rows' part of the means over those of a mini-batch.

    `loss` is the one that is minimized, and carries the gradient. The others: docs/metrics.md;
    `policy_loss` contains the KL where that is in the loss, `ratio` is the probability ratio,
    `value_loss` PPO's alone.
    """

    loss: Tensor
    policy_loss: Tensor
    entropy: Tensor
    clip_fraction: Tensor
    ratio: Tensor
    value_loss: Tensor | None = None

    def vector(self) -> Tensor:
        """The terms that there are, as one tensor without gradient. `LossTerms(*vector)` names them
        again: the only one that may be missing, `value_loss`, is the last.
        """
        return torch.stack([term.detach() for term in self if term is not None])

    def over(self, count: Tensor) -> "LossTerms":
        """Each term, divided."""
        return LossTerms._make(None if term is None else term / count for term in self)


def ppo_losses(
    *,
    logprobs: Tensor,
    values: Tensor,
    entropies: Tensor,
    old_logprobs: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    mask: Tensor,
    weights: Tensor,
    cliprange: float,
    cliprange_value: float,
    vf_coef: float,
    cliprange_high: float | None = None,
) -> LossTerms:
    """TRL's clipped losses (Eq. 11, 13), summed over response tokens.

    Args:
        logprobs, values, entropies: of the policy being trained; all tensors but the weights are (batch, R).
        old_logprobs, old_values: of the policy that sampled.
        advantages, returns: see `gae`.
        mask: 1 where there is a response token.
        weights: (batch,), of each row in both losses.
        cliprange, cliprange_value: of the probability ratio and of the values.
        vf_coef: weight of the value loss.
        cliprange_high: of a ratio above 1; None: `cliprange`.
    """
    ratio = ((logprobs - old_logprobs) * mask).exp()  # 1 at padding, where it could overflow
    unclipped = -advantages * ratio
    clipped = -advantages * _clip(ratio, cliprange, cliprange_high)
    policy_loss = _total(weights[:, None] * torch.max(unclipped, clipped), mask)  # Eq. 11

    clipped_values = torch.max(
        torch.min(values, old_values + cliprange_value), old_values - cliprange_value
    )
    error = (values - returns).square()
    clipped_error = (clipped_values - returns).square()
    value_loss = 0.5 * _total(weights[:, None] * torch.max(error, clipped_error), mask)

    return LossTerms(
        loss=policy_loss + vf_coef * value_loss,  # Eq. 13
        policy_loss=policy_loss,
        entropy=_total(entropies, mask),
        clip_fraction=_total(clipped.detach() > unclipped.detach(), mask),
        ratio=_total(ratio.detach(), mask),
        value_loss=value_loss,
    )


def _total(x: Tensor, mask: Tensor) -> Tensor:
    """The sum over response tokens."""
    return (x * mask).sum()


def _clip(ratio: Tensor, cliprange: float, cliprange_high: float | None) -> Tensor:
    """The probability ratio within its range."""
    high = cliprange if cliprange_high is None else cliprange_high
    return ratio.clamp(1.0 - cliprange, 1.0 + high)


def group_advantages(rewards: Tensor, algorithm: str, group_size: int, branches: int = 1) -> Tensor:
    """The advantage of each response, from the rewards of its role alone.

    Args:
        rewards: (rows,), those of a group one after the other, then the next group's.
        algorithm: its name in `GROUP_ALGORITHMS`, which says what its baseline is.
        group_size: chains per query, which are a group.
        branches: above 1, so many responses to the same response of the role before are a group instead. The mean of
            the others is then REINFORCE's baseline, too: they share all that the response depends on.

    The mean of the role's batch is over all processes; a standard deviation gets 1e-4 added.

    >>> group_advantages(torch.tensor([1.0, 3.0, 5.0, 5.0]), "rloo", 2).tolist()
    [-2.0, 2.0, 0.0, 0.0]
    """
    rule = GROUP_ALGORITHMS[algorithm]
    if branches > 1:
        group_size = branches
    elif rule.baseline == "batch":
        total = distributed.all_reduce_sum(rewards.sum(0, keepdim=True)) / distributed.world_size()
        return rewards - total / len(rewards)
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    if rule.baseline != "group":
        # Equals subtracting the mean of the others.
        centred = centred * group_size / (group_size - 1)
    if rule.divides_by_std:
        centred = centred / (groups.std(1, keepdim=True) + 1e-4)
    return centred.flatten()


def share_of_equal_groups(rewards: Tensor, group_size: int) -> float:
    """The share of groups, over all processes, whose rewards are all equal.

    >>> share_of_equal_groups(torch.tensor([1.0, 3.0, 5.0, 5.0]), 2)
    0.5
    """
    groups = rewards.view(-1, group_size)
    equal = (groups == groups[:, :1]).all(1).float().mean()
    return (distributed.all_reduce_sum(equal) / distributed.world_size()).item()


def group_losses(
    *,
    logprobs: Tensor,
    entropies: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    algorithm: str,
    cliprange: float,
    max_new_tokens: int,
    kl_coef: float,
    cliprange_high: float | None = None,
) -> LossTerms:
    """The clipped loss, summed over responses, and statistics summed over response tokens.

    `GROUP_ALGORITHMS` says over what the loss of a response is taken. With a mean over the tokens of
    the batch it is their sum: the weights divide by the mean number of tokens.

    Args:
        logprobs, entropies: of the policy being trained; all tensors but the weights are (batch, R).
        old_logprobs: of the policy that sampled.
        ref_logprobs: of the reference.
        advantages: equal along a row.
        mask: 1 where there is a response token.
        weights: (batch,), of each response in the loss.
        algorithm: its name in `GROUP_ALGORITHMS`.
        cliprange: of the probability ratio.
        max_new_tokens: that of the settings.
        kl_coef: of the KL to the reference as a term of each token's loss, 0: none. It is the ratio, not clipped,
            times the k3 estimate `exp(d) - d - 1`, `d` the reference's log-probability minus the
            policy's (Schulman, 2020). The gradient goes through both: that of k3 alone is not the
            KL's, even where the ratio is 1.
        cliprange_high: of a ratio above 1; None: `cliprange`.
    """
    loss_over = GROUP_ALGORITHMS[algorithm].loss_over
    of_responses = loss_over == "response"

    difference = (logprobs - old_logprobs) * mask
    if of_responses:
        # Clamped far above any clip range: a long response's ratio could exceed float32.
        ratio = difference.sum(1, keepdim=True).clamp(max=20.0).exp()
        advantages = advantages[:, :1]
    else:
        ratio = difference.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * _clip(ratio, cliprange, cliprange_high)
    policy_terms = torch.max(unclipped, clipped)

    if of_responses:
        response_losses = policy_terms[:, 0]
    else:
        if kl_coef:
            gap = (ref_logprobs - logprobs) * mask
            policy_terms = policy_terms + kl_coef * ratio * (gap.exp() - gap - 1)
        response_losses = (policy_terms * mask).sum(1)
        if loss_over == "tokens":
            response_losses = response_losses / mask.sum(1)
        elif loss_over == "limit":
            response_losses = response_losses / max_new_tokens

    loss = (weights * response_losses).sum()
    return LossTerms(
        loss=loss,
        policy_loss=loss,
        entropy=_total(entropies, mask),
        clip_fraction=_total((clipped.detach() > unclipped.detach()).expand_as(mask), mask),
        ratio=_total(ratio.detach().expand_as(mask), mask),
    )
