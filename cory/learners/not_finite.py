"""Which rows make a loss or a gradient that is not finite."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cory.errors import NotFinite
from cory.learners.update import Update
from cory.models.rollout import Rollout

if TYPE_CHECKING:
    from cory.learners.learner import Learner


def of_loss(learner: "Learner", update: Update, mini_batches: list[list[int]]) -> NotFinite:
    """The error of an optimizer step whose loss is not finite, with the rows that cause it."""
    indices = [row for mini_batch in mini_batches for row in mini_batch]
    return _error("the loss", update.rollouts, _rows_of_passes(learner, update, indices))


def of_gradient(learner: "Learner", update: Update, mini_batches: list[list[int]]) -> NotFinite:
    """The error of an optimizer step whose gradient is not finite, while its loss is."""
    rows: set[int] = set()
    for indices in mini_batches:
        rows |= _rows_of_passes(learner, update, indices)
        rows |= _rows_of_gradient(learner, update, indices)
    return _error("the gradient", update.rollouts, rows)


@torch.no_grad()
def _rows_of_passes(learner: "Learner", update: Update, indices: list[int]) -> set[int]:
    """The rows with a number that is not finite: of the batch under the policy that sampled, and of
    those of these indices under the policy being trained.
    """
    old = update.old
    finite = torch.stack([old.logprobs, old.values, old.kl]).isfinite().all(0)
    rows = set(_not_finite(finite, range(len(finite))))
    for chunk in update.batch.by_length(learner.micro_batch, indices):
        new = learner.forward(update.batch.select(chunk))
        numbers = new.logprobs if new.values is None else new.logprobs + new.values
        rows |= set(_not_finite(numbers.isfinite(), chunk))
    return rows


def _rows_of_gradient(learner: "Learner", update: Update, indices: list[int]) -> set[int]:
    """The rows of a mini-batch whose gradient is not finite.

    The gradients of weights are sums over rows. That of the embedded tokens, which the backward
    pass reaches last, has each row by itself, and a number that is not finite comes through to it.
    No gradient of a weight is made, so nothing is exchanged between processes that hold whole
    agents.
    """
    rows: set[int] = set()
    embedded: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        embedded.append(output.requires_grad_())  # below adapters nothing is trained

    tokens = sum(update.batch.response_lengths[row] for row in indices)
    mean_length = torch.tensor(tokens / len(indices), device=learner.device)
    hook = learner.policy.get_input_embeddings().register_forward_hook(keep)
    try:
        for chunk in update.batch.by_length(learner.micro_batch, indices):
            micro_batch = update.batch.select(chunk)
            with learner.accelerator.no_sync(learner.model):
                new = learner.forward(micro_batch)
                terms = learner.terms(update, new, chunk, micro_batch, mean_length)
                (gradient,) = torch.autograd.grad(terms.loss / tokens, embedded.pop())
            rows |= set(_not_finite(gradient.isfinite().flatten(1), chunk))
    finally:
        hook.remove()
    return rows


def _not_finite(finite: Tensor, indices: Sequence[int]) -> list[int]:
    """The indices of the rows of `finite`, (rows, ...), in which not everything is true."""
    return [indices[row] for row in (~finite.all(-1)).nonzero().flatten().tolist()]


def _error(what: str, rollouts: Sequence[Rollout], rows: set[int]) -> NotFinite:
    """The error that names agent, role, rows and text. `rows`: of the batch, one rollout after the other."""
    agent = rollouts[0].agent
    if not rows:
        return NotFinite(what, f"{agent} as {' and '.join(rollout.role for rollout in rollouts)}")
    first = 0  # row of the batch with which a rollout begins
    for rollout in rollouts:
        size = len(rollout.prompts)
        rollout_rows = sorted(row - first for row in rows if first <= row < first + size)
        if rollout_rows:
            break
        first += size
    text = f"{rollout.prompts[rollout_rows[0]]!r} -> {rollout.completions[rollout_rows[0]]!r}"
    return NotFinite(what, f"{agent} as {rollout.role}", rollout_rows, text)
