"""Typed records of an update: outputs of its passes, targets of its loss, and its statistics.

R is the length of the longest response in tokens. Shapes are (rows, R) unless stated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from cory.learners.losses import LossTerms
from cory.models.window import Window
from cory.parallel.devices import to_device


class ForwardPass(NamedTuple):
    """Outputs of a forward pass at the response positions.

    Args:
        logprobs: log-probabilities of the response tokens.
        values: value predictions; PPO only.
        all_logprobs: log-probabilities (rows, R, vocabulary) of all tokens.
    """

    logprobs: Tensor
    values: Tensor | None
    all_logprobs: Tensor


class BatchSizes(NamedTuple):
    """The numbers that a loss is averaged over: response tokens (a scalar tensor) and responses."""

    tokens: Tensor
    responses: int


@dataclass
class OldPolicy:
    """Outputs of the policy that sampled the rows.

    `kl` is each response token's KL to the reference. `first_pass` is the pass that gave these numbers, with its graph,
    if the first optimizer step can reuse it.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    kl: Tensor
    first_pass: ForwardPass | None = None

    @classmethod
    def zeros(cls, window: Window) -> "OldPolicy":
        """Returns zeros, to be filled in."""
        logprobs, ref_logprobs, values, kl = torch.zeros(
            4, *window.response_mask.shape, device=window.input_ids.device
        )
        return cls(logprobs, ref_logprobs, values, kl)

    def take_first_pass(self) -> ForwardPass | None:
        """Returns the first pass and drops it. Its graph can be used only once, and a retry after
        running out of memory needs its memory.
        """
        first_pass, self.first_pass = self.first_pass, None
        return first_pass


@dataclass
class Targets:
    """The loss's targets: advantages, and for PPO the returns that values are fitted to.

    If responses are compared in groups, `frac_reward_zero_std` has each rollout's share of groups with equal rewards.
    """

    advantages: Tensor
    returns: Tensor | None = None
    frac_reward_zero_std: Sequence[float | None] | None = None


@dataclass
class Experience:
    """All rows of an update, one rollout after the other, or a selection of these rows.

    `weights` (rows,) are the rows' weights in the loss; 0 leaves a row out.
    """

    window: Window
    old: OldPolicy
    targets: Targets
    weights: Tensor

    @property
    def mask(self) -> Tensor:
        """1 at response tokens."""
        return self.window.response_mask

    def select(self, indices: Sequence[int]) -> "Experience":
        """Returns the rows at `indices`, in that order, without the padding that all of them share."""
        window = self.window.select(indices)
        rows = to_device(torch.tensor(indices), self.weights.device)
        tokens = (rows, slice(window.response_ids.shape[1]))
        old = self.old
        targets = self.targets
        return Experience(
            window,
            OldPolicy(
                logprobs=old.logprobs[tokens],
                ref_logprobs=old.ref_logprobs[tokens],
                values=old.values[tokens],
                kl=old.kl[tokens],
            ),
            Targets(
                advantages=targets.advantages[tokens],
                returns=None if targets.returns is None else targets.returns[tokens],
            ),
            self.weights[rows],
        )


class Step(NamedTuple):
    """Results of one optimizer step's backward passes, over all processes."""

    terms: list[LossTerms]  # one per mini-batch
    gradient_norm: float
    sum_of_terms: float  # finite if all terms are finite
    largest_ratio: float  # the largest mini-batch mean of the probability ratio


@dataclass(kw_only=True)
class UpdateStats:
    """Statistics of one rollout (an agent's responses in one role) in an update; docs/metrics.md has the formulas.

    `kl`, `response_tokens` and `frac_reward_zero_std` describe the rollout itself: the mean KL and length of its
    responses under the policy that sampled them, and the share of its groups with equal rewards. All others describe
    the whole update and are equal for all its rollouts. For a frozen agent, all others are None, and `dropped_steps` is
    0.
    """

    kl: float
    kl_coef: float | None = None
    entropy: float | None = None
    policy_loss: float | None = None
    value_loss: float | None = None  # PPO only
    explained_variance: float | None = None  # PPO only
    clip_fraction: float | None = None
    gradient_norm: float | None = None
    dropped_steps: int = 0
    response_tokens: float
    engine_difference: float | None = None  # this and the next two: only with vLLM
    engine_ratio: float | None = None
    engine_capped: float | None = None
    frac_reward_zero_std: float | None = None  # only if responses are compared in groups

    def metrics(self) -> dict[str, float]:
        """Returns the statistics by name, leaving out the missing ones."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: float(value) for name, value in values.items() if value is not None}
