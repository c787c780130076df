"""Log-probabilities, token rewards, advantages and losses: functions of (batch, R) tensors of response tokens.

R is the length of the longest response in tokens.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cory.parallel import distributed


class TokenLogprobs(torch.autograd.Function):
    """Log-softmax and the log-probabilities of the chosen tokens, allocating only one array of vocabulary size.

    `apply(logits (..., V), ids (...), temperature)` returns `logprobs (...)`, with gradient, and
    `all_logprobs (..., V)`, without gradient, for entropy and KL. Both describe the distribution
    sampled at this temperature. Autograd's own backward pass would allocate two more arrays of
    vocabulary size and would not be faster.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """See the class docstring."""
        if temperature != 1.0:
            logits = logits / temperature
        all_logprobs = logits.log_softmax(-1)
        ctx.temperature = temperature
        ctx.save_for_backward(all_logprobs, ids)
        ctx.mark_non_differentiable(all_logprobs)
        ctx.set_materialize_grads(False)  # else autograd allocates zeros for `all_logprobs`
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
    """Returns the entropy in nats at every position, (batch, R), computed `rows` rows at a time.

    Args:
        logprobs: log-probabilities (batch, R, vocabulary).
    """
    return torch.cat([-part.exp().mul_(part).sum(-1) for part in logprobs.split(rows)])


def token_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Eq. 2: `-eta * KL` at every response token, plus the training reward at the last one.

    Args:
        rewards: training rewards (batch,).
        kl: KL of each response token (batch, R).
        mask: 1 at response tokens (batch, R).
        kl_coef: eta.

    Returns (batch, R) rewards.
    """
    penalties = -kl_coef * kl
    last_token = mask.sum(1, keepdim=True) - 1
    return penalties.scatter_add(1, last_token, rewards[:, None].to(penalties.dtype))  # Eq. 2


def mean_and_variance(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and unbiased variance (0 for a single value) of `x` where `mask` is 1, over all processes."""
    total, count = distributed.all_reduce_sum(torch.stack([(x * mask).sum(), mask.sum()]))
    mean = total / count
    return mean, distributed.all_reduce_sum(((x - mean).square() * mask).sum()) / (count - 1).clamp(
        min=1
    )


def all_alike(rewards: Tensor) -> bool:
    """Whether all rewards (batch,) are equal, over all processes."""
    largest = distributed.all_reduce_max(rewards.max().item())
    return largest == -distributed.all_reduce_max(-rewards.min().item())


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shifts and scales values (batch, R) to mean 0 and variance 1 over the mask."""
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
    """GAE (Eq. 12). Advantages are whitened over the response tokens of all processes; TRL whitens within each process.

    If all responses have the same training reward (`scores_alike`), token rewards differ only by the KL. Advantages are
    then centred but not scaled: scaling would magnify the noise of a small KL to the size of a reward.

    Returns advantages and returns. All tensors are (batch, R).
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
    """`1 - Var(R - V) / Var(R)` over the response tokens of all processes; all tensors are (batch, R).

    1 means that the critic predicts the returns exactly, 0 that it is no better than their mean. NaN
    if the returns do not vary.
    """
    _, variance = mean_and_variance(returns, mask)
    _, unexplained = mean_and_variance(returns - values, mask)
    return torch.where(variance > 0, 1 - unexplained / variance, math.nan)


class LossTerms(NamedTuple):
    """The loss and its statistics as scalar tensors.

    `ppo_losses` returns sums over the response tokens of some rows. `Learner.loss_terms` returns these rows'
    contribution to the means of their mini-batch. `loss` is minimized and carries the gradient; docs/metrics.md defines
    the statistics. `policy_loss` includes the KL if the KL is in the loss, `ratio` is the probability ratio, and only
    PPO has a `value_loss`.
    """

    loss: Tensor
    policy_loss: Tensor
    entropy: Tensor
    clip_fraction: Tensor
    ratio: Tensor
    value_loss: Tensor | None = None

    def vector(self) -> Tensor:
        """Stacks the terms into one tensor without gradient. `LossTerms(*vector)` restores the names:
        only `value_loss` may be missing, and it is the last term.
        """
        return torch.stack([term.detach() for term in self if term is not None])

    def over(self, count: Tensor) -> "LossTerms":
        """Divides each term by `count`."""
        return LossTerms._make(None if term is None else term / count for term in self)


def clipped_losses(
    ratio: Tensor, advantages: Tensor, cliprange: float, cliprange_high: float | None
) -> tuple[Tensor, Tensor]:
    """`-min(ratio * A, clip(ratio) * A)` (Eq. 11), and whether the minimum is the clipped term.

    The ratio is clipped to the range from `1 - cliprange` to `1 + cliprange_high`, which defaults to `cliprange`.
    """
    high = cliprange if cliprange_high is None else cliprange_high
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - cliprange, 1.0 + high)
    return torch.max(unclipped, clipped), clipped.detach() > unclipped.detach()


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
        logprobs, values, entropies: outputs of the policy being trained; all tensors except `weights` are (batch, R).
        old_logprobs, old_values: outputs of the policy that sampled.
        advantages, returns: see `gae`.
        mask: 1 at response tokens.
        weights: weight (batch,) of each row in both losses.
        cliprange, cliprange_value: clip ranges of the probability ratio and the values.
        vf_coef: weight of the value loss.
        cliprange_high: clip range of ratios above 1; `cliprange` if None.
    """
    # Masked before `exp`, which could overflow at padding.
    ratio = ((logprobs - old_logprobs) * mask).exp()
    policy_losses, is_clipped = clipped_losses(ratio, advantages, cliprange, cliprange_high)
    policy_loss = total(weights[:, None] * policy_losses, mask)  # Eq. 11

    clipped_values = torch.max(
        torch.min(values, old_values + cliprange_value), old_values - cliprange_value
    )
    error = (values - returns).square()
    clipped_error = (clipped_values - returns).square()
    value_loss = 0.5 * total(weights[:, None] * torch.max(error, clipped_error), mask)

    return LossTerms(
        loss=policy_loss + vf_coef * value_loss,  # Eq. 13
        policy_loss=policy_loss,
        entropy=total(entropies, mask),
        clip_fraction=total(is_clipped, mask),
        ratio=total(ratio.detach(), mask),
        value_loss=value_loss,
    )


def total(x: Tensor, mask: Tensor) -> Tensor:
    """Sums `x`, (rows, R) or (rows, 1), over response tokens."""
    return (x * mask).sum()
