"""The data of one update: the batch, its forward passes, targets, and what the optimizer steps have given."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cory.learners import losses
from cory.learners.head import ChunkedHead
from cory.learners.losses import LossTerms
from cory.learners.trl_parts import RewardMoments
from cory.models.rollout import Rollout
from cory.models.window import Window
from cory.parallel import distributed
from cory.parallel.devices import to_device


class ForwardPass(NamedTuple):
    """What a forward pass gives for its rows, at their response positions.

    logprobs: (rows, R), of the response tokens. values: (rows, R), PPO only. all_logprobs: (rows, R,
    vocabulary), or in its place, where the output layer is run in chunks, `head` and `entropies`
    (rows, R).
    """

    logprobs: Tensor
    values: Tensor | None
    all_logprobs: Tensor | None = None
    head: ChunkedHead | None = None
    entropies: Tensor | None = None


@dataclass
class EvaluatedBatch:
    """A batch under a policy, such as the one that sampled it; all tensors (batch, R).

    `kl` is that of each response token to the reference.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    kl: Tensor

    @classmethod
    def zeros(cls, batch: Window) -> "EvaluatedBatch":
        """Zeros, to be filled in."""
        logprobs, ref_logprobs, values, kl = torch.zeros(
            4, *batch.response_mask.shape, device=batch.input_ids.device
        )
        return cls(logprobs, ref_logprobs, values, kl)

    def select(self, indices: Sequence[int], width: int) -> "EvaluatedBatch":
        """The rows of these indices, in that order, cut to `width` tokens."""
        rows = to_device(torch.tensor(indices), self.kl.device)
        return EvaluatedBatch(
            self.logprobs[rows, :width],
            self.ref_logprobs[rows, :width],
            self.values[rows, :width],
            self.kl[rows, :width],
        )


@dataclass
class Targets:
    """What the loss makes of the rewards: (batch, R) advantages, and for PPO the returns that values are fitted to."""

    advantages: Tensor
    returns: Tensor | None = None

    def select(self, indices: Sequence[int], width: int) -> "Targets":
        """The rows of these indices, in that order, cut to `width` tokens."""
        rows = to_device(torch.tensor(indices), self.advantages.device)
        returns = None if self.returns is None else self.returns[rows, :width]
        return Targets(self.advantages[rows, :width], returns)


@dataclass
class Update:
    """One update under way: its data, and what its optimizer steps have given so far."""

    rollouts: Sequence[Rollout]
    batch: Window  # the rows of all rollouts, one rollout after the other
    old: EvaluatedBatch  # under the policy that sampled
    targets: Targets
    weights: Tensor  # (batch,), of each row's part of the loss
    reward_moments: RewardMoments  # with this batch's rewards
    engine_difference: float | None = None  # where an engine has sampled
    # The pass that gave the old log-probabilities, where the first mini-batch takes it over, too.
    first_pass: ForwardPass | None = None
    terms: list[LossTerms] = field(default_factory=list)  # of each mini-batch
    gradient_norms: list[float] = field(default_factory=list)  # of each optimizer step
    dropped_steps: int = 0

    def rollout_means(self) -> tuple[list[float], list[float]]:
        """Of each rollout, over the rows of all processes: the mean KL of a response to the reference, and its mean
        length in tokens.

        Both are of the policy that sampled: before the first optimizer step.
        """
        sizes = [len(rollout.completions) for rollout in self.rollouts]
        mask = self.batch.response_mask
        kls = [kl.sum() for kl in (self.old.kl * mask).split(sizes)]
        tokens = [tokens.sum() for tokens in mask.split(sizes)]
        sums = distributed.all_reduce_sum(torch.stack([*kls, *tokens]))
        kl_sums, token_sums = sums.view(2, -1).tolist()
        rows = [size * distributed.world_size() for size in sizes]
        return (
            [kl / count for kl, count in zip(kl_sums, rows, strict=True)],
            [tokens / count for tokens, count in zip(token_sums, rows, strict=True)],
        )

    def term_means(self) -> dict[str, float]:
        """Each of the `LossTerms` that there are, on average over the mini-batches of all epochs."""
        names = [*LossTerms._fields]
        if self.targets.returns is None:
            names.remove("value_loss")
        means = torch.stack([terms.vector() for terms in self.terms]).mean(0)
        return dict(zip(names, means.tolist(), strict=True))

    def explained_variance(self) -> float | None:
        """Of the values of the policy that sampled; None without a value head."""
        returns = self.targets.returns
        if returns is None:
            return None
        mask = self.batch.response_mask
        return losses.explained_variance(self.old.values, returns, mask).item()

    def take_first_pass(self) -> ForwardPass | None:
        """The first pass, once: its graph serves once, and a second try after memory ran out needs
        its memory.
        """
        first_pass, self.first_pass = self.first_pass, None
        return first_pass


class StepGradients(NamedTuple):
    """What the backward passes of one optimizer step have given, over all processes."""

    terms: list[LossTerms]  # of each mini-batch
    norm: float  # of the gradient
    sum_of_terms: float  # finite if all terms are
    largest_ratio: float  # mean probability ratio, of the mini-batch in which it is largest
