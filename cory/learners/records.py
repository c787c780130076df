"""The data of an update, as typed records: what its passes give, what the loss needs, what it reports.

R is the longest response of the rows, in tokens. Shapes are (rows, R) unless stated.
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
    """What a forward pass gives for its rows, at their response positions.

    logprobs: of the response tokens. values: PPO only. all_logprobs: (rows, R, vocabulary).
    """

    logprobs: Tensor
    values: Tensor | None
    all_logprobs: Tensor


class BatchSizes(NamedTuple):
    """Over which a loss is averaged: response tokens, a scalar tensor, and responses."""

    tokens: Tensor
    responses: int


@dataclass
class OldPolicy:
    """Rows under the policy that sampled them.

    `kl` is that of each response token to the reference. `first_pass`: the pass with its graph that
    gave these numbers, where it is also the one of the first optimizer step.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    kl: Tensor
    first_pass: ForwardPass | None = None

    @classmethod
    def zeros(cls, window: Window) -> "OldPolicy":
        """Zeros, to be filled in."""
        logprobs, ref_logprobs, values, kl = torch.zeros(
            4, *window.response_mask.shape, device=window.input_ids.device
        )
        return cls(logprobs, ref_logprobs, values, kl)

    def take_first_pass(self) -> ForwardPass | None:
        """The first pass, once: its graph serves once, and a second try after memory ran out needs
        its memory.
        """
        first_pass, self.first_pass = self.first_pass, None
        return first_pass


@dataclass
class Targets:
    """What the loss makes of the rewards: advantages, and for PPO the returns that values are fitted to.

    `frac_reward_zero_std`: of each rollout, where responses are compared in groups.
    """

    advantages: Tensor
    returns: Tensor | None = None
    frac_reward_zero_std: Sequence[float | None] | None = None


@dataclass
class Experience:
    """The rows of all rollouts of an update, one rollout after the other; or some of them.

    `weights`: (rows,), of each row's part of the loss; 0 leaves it out.
    """

    window: Window
    old: OldPolicy
    targets: Targets
    weights: Tensor

    @property
    def mask(self) -> Tensor:
        """1 where there is a response token."""
        return self.window.response_mask

    def select(self, indices: Sequence[int]) -> "Experience":
        """The rows of these indices, in that order, without padding that all of them share."""
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
    """What the backward passes of one optimizer step have given, over all processes."""

    terms: list[LossTerms]  # of each mini-batch
    gradient_norm: float
    sum_of_terms: float  # finite if all terms are
    largest_ratio: float  # mean probability ratio, of the mini-batch in which it is largest


@dataclass(kw_only=True)
class UpdateStats:
    """Statistics of one rollout's part in an update; names and formulas are those of
    docs/metrics.md.

    `kl`, `response_tokens` and `frac_reward_zero_std` are the rollout's own: the means over its rows
    of a response's summed KL and of its length, under the policy that sampled, before the first
    optimizer step, and the share of its groups with equal rewards. The others are of the whole
    update, the same for all its rollouts; a frozen agent has none of them but `dropped_steps`, which
    is 0.
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
    engine_difference: float | None = None  # this and the next two where an engine has sampled
    engine_ratio: float | None = None
    engine_capped: float | None = None
    frac_reward_zero_std: float | None = None  # where responses are compared in groups

    def metrics(self) -> dict[str, float]:
        """The statistics by name, without those that this update does not have."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: float(value) for name, value in values.items() if value is not None}
