"""The learners' arithmetic on (batch, R) tensors of a response window: log-probabilities, KL, advantages, losses."""

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cory.errors import one_of
from cory.run import processes

ALGORITHMS = ("grpo", "dr_grpo", "rloo", "reinforce")  # that compare the responses of a group or batch
KL_ESTIMATES = ("full", "kl", "abs", "mse")


class TokenLogprobs(torch.autograd.Function):
    """Log-softmax and the log-probabilities of the chosen tokens, in one array of the vocabulary's size.

    `apply(logits (..., V), ids (...))` returns `logprobs (...)`, which carry the gradient, and `all_logprobs (..., V)`
    for entropy and KL, which do not. Autograd's own backward pass would make two more arrays of that size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        all_logprobs = logits.log_softmax(-1)
        ctx.save_for_backward(all_logprobs, ids)
        ctx.mark_non_differentiable(all_logprobs)
        ctx.set_materialize_grads(False)  # no array of zeros for it
        return all_logprobs.gather(-1, ids[..., None]).squeeze(-1), all_logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        """`d log p(chosen) / d logits = onehot(chosen) - p`."""
        if grads[0] is None:
            return None, None
        all_logprobs, ids = ctx.saved_tensors
        grad = grads[0][..., None]
        return all_logprobs.exp().mul_(-grad).scatter_add_(-1, ids[..., None], grad), None


@torch.no_grad()
def entropy(logprobs: Tensor, rows: int) -> Tensor:
    """Entropy in nats at every position: (batch, R, vocabulary) to (batch, R), `rows` of the batch at a time."""
    return torch.cat([-part.exp().mul_(part).sum(-1) for part in logprobs.split(rows)])


def kl_penalty(kind: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The (batch, R) KL of each response token to the reference in nats, as TRL's `kl_penalty` names its estimates.

    Args:
        kind: `full`: KL(pi, pi_0) over the vocabulary (Eq. 2); `kl`, `abs` or `mse`: of the sampled token.
        logprobs, ref_logprobs: (batch, R), for `full` (batch, R, vocabulary).
    """
    one_of("ppo.kl_penalty", KL_ESTIMATES, kind)
    if kind == "full":
        return F.kl_div(ref_logprobs, logprobs, log_target=True, reduction="none").sum(-1)
    difference = logprobs - ref_logprobs
    return {"kl": difference, "abs": difference.abs(), "mse": 0.5 * difference.square()}[kind]


def token_rewards(scores: Tensor, kls: Tensor, mask: Tensor, kl_coef: float) -> tuple[Tensor, Tensor]:
    """Eq. 2: `-eta * KL` at every response token, plus the score at the last one.

    Takes (batch,) training rewards `scores` and (batch, R) KLs; returns (batch, R) rewards and the KL's part of them.
    """
    penalties = -kl_coef * kls
    last = mask.sum(1, keepdim=True) - 1
    return penalties.scatter_add(1, last, scores[:, None].to(penalties.dtype)), penalties


def mean_and_variance(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (0 of one) of the (batch, R) values that the mask keeps, over all processes."""
    total, count = processes.all_reduce_sum(torch.stack([(x * mask).sum(), mask.sum()]))
    mean = total / count
    return mean, processes.all_reduce_sum(((x - mean).square() * mask).sum()) / (count - 1).clamp(min=1)


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales the (batch, R) values that the mask keeps to variance 1, and to mean 0 if `shift_mean`."""
    mean, variance = mean_and_variance(x, mask)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else whitened + mean


def gae(
    values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float, whiten_rewards: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """GAE (Eq. 12), whitened over the response tokens of all processes together; TRL whitens within each process.

    Returns masked values, advantages and returns; all tensors, given or returned, are (batch, R).
    """
    values, rewards = values * mask, rewards * mask
    if whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    advantages, last = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    next_values = torch.zeros_like(last)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        last = delta + gamma * lam * last
        advantages[:, t], next_values = last, values[:, t]
    return values, whiten(advantages, mask), advantages + values


# Sums over response tokens, each a scalar tensor, under TRL's names: `loss_policy` is `ppo/loss/policy`.
LossStats = namedtuple(
    "LossStats",
    "loss_policy loss_value policy_entropy policy_approxkl policy_policykl policy_clipfrac policy_ratio "
    "val_vpred val_error val_clipfrac",
)


def ppo_losses(
    new: Sequence[Tensor], sampled: Sequence[Tensor], mask: Tensor, cliprange: float, cliprange_value: float
) -> LossStats:
    """TRL's clipped losses (Eq. 11, 13), summed over response tokens; the first two carry the gradient.

    Args:
        new: log-probabilities, values and entropies of the policy being trained; all tensors are (batch, R).
        sampled: log-probabilities and values of the policy that sampled, advantages, returns.
    """
    logprobs, values, entropies = new
    old_logprobs, old_values, advantages, returns = sampled
    difference = logprobs - old_logprobs
    ratio = difference.exp()
    policy, clipped_policy = -advantages * ratio, -advantages * ratio.clamp(1.0 - cliprange, 1.0 + cliprange)
    error = (values - returns).square()
    clipped_values = torch.max(torch.min(values, old_values + cliprange_value), old_values - cliprange_value)
    clipped_error = (clipped_values - returns).square()

    def total(x: Tensor) -> Tensor:
        return (x * mask).sum()

    return LossStats(
        loss_policy=total(torch.max(policy, clipped_policy)),
        loss_value=0.5 * total(torch.max(error, clipped_error)),
        policy_entropy=total(entropies),
        policy_approxkl=0.5 * total(difference.detach().square()),
        policy_policykl=total(-difference.detach()),
        policy_clipfrac=total(clipped_policy.detach() > policy.detach()),
        policy_ratio=total(ratio.detach()),
        val_vpred=total(values.detach()),
        val_error=total(error.detach()),
        val_clipfrac=total(clipped_error.detach() > error.detach()),
    )


def group_advantages(rewards: Tensor, algorithm: str, group_size: int, parts: int = 1) -> Tensor:
    """The advantage of each response, from the rewards of its role alone.

    Args:
        rewards: (rows,), the `group_size` chains of a query one after the other, then the next query's, then the next
            role's. algorithm: see `GroupLearner`. parts: roles, of equally many rows.

    `grpo`: minus the group's mean, over its standard deviation + 1e-4 (Shao et al., 2024); `dr_grpo`: without the
    division (Liu et al., 2025); `rloo`: minus the mean of the others of the group (Ahmadian et al., 2024);
    `reinforce`: minus the mean of the role's batch, over all processes.

    >>> group_advantages(torch.tensor([1.0, 3.0, 5.0, 5.0]), "rloo", 2).tolist()
    [-2.0, 2.0, 0.0, 0.0]
    """
    one_of("algorithm", ALGORITHMS, algorithm)
    if algorithm == "reinforce":
        roles = rewards.view(parts, -1)
        totals = processes.all_reduce_sum(roles.sum(1, keepdim=True)) / processes.world_size()
        return (roles - totals / roles.shape[1]).flatten()
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    if algorithm == "rloo":
        centred = centred * group_size / (group_size - 1)  # equals subtracting the mean of the others
    if algorithm == "grpo":
        centred = centred / (groups.std(1, keepdim=True) + 1e-4)
    return centred.flatten()


# Sums over response tokens, each a scalar tensor, under TRL's names.
PolicyStats = namedtuple(
    "PolicyStats", "loss_policy policy_entropy policy_approxkl policy_policykl policy_clipfrac policy_ratio"
)


def group_losses(
    new: Sequence[Tensor],
    sampled: Sequence[Tensor],
    mask: Tensor,
    algorithm: str,
    cliprange: float,
    longest: int,
    kl_coef: float,
) -> PolicyStats:
    """The clipped loss, summed over responses, which carries the gradient, and statistics summed over response tokens.

    `grpo`: mean over a response's tokens, each with its probability ratio; `dr_grpo`: their sum over `longest`, a
    constant; `rloo`, `reinforce`: one ratio, that of the whole response (as current TRL has it).

    Args:
        new: log-probabilities and entropies of the policy being trained; all tensors are (batch, R).
        sampled: log-probabilities of the policy that sampled and of the reference, advantages (equal along a row).
        kl_coef: of the KL to the reference as a loss term, by the k3 estimate `exp(d) - d - 1`, `d` the reference's
            log-probability minus the policy's (Schulman, 2020); 0: none.
    """
    one_of("algorithm", ALGORITHMS, algorithm)
    logprobs, entropies = new
    old_logprobs, ref_logprobs, advantages = sampled
    difference = (logprobs - old_logprobs) * mask
    whole = algorithm in ("rloo", "reinforce")
    # Clamped far above any clip range: a long response's ratio could exceed float32.
    ratio = (difference.sum(1, keepdim=True).clamp(max=20.0) if whole else difference).exp()
    advantage = advantages[:, :1] if whole else advantages
    policy, clipped = -advantage * ratio, -advantage * ratio.clamp(1.0 - cliprange, 1.0 + cliprange)
    terms = torch.max(policy, clipped)
    gap = ((ref_logprobs - logprobs) * mask) if kl_coef else None
    k3 = kl_coef * (gap.exp() - gap - 1) if gap is not None else torch.zeros_like(difference)
    if whole:
        rows = terms[:, 0] + k3.sum(1)
    else:
        rows = ((terms + k3) * mask).sum(1) / (mask.sum(1) if algorithm == "grpo" else longest)

    def total(x: Tensor) -> Tensor:
        return (x * mask).sum()

    away = difference.detach()
    return PolicyStats(
        loss_policy=rows.sum(),
        policy_entropy=total(entropies),
        policy_approxkl=0.5 * total(away.square()),
        policy_policykl=total(-away),
        policy_clipfrac=total((clipped.detach() > policy.detach()).expand_as(mask)),
        policy_ratio=total(away.exp()),
    )
