"""Which rows make a loss or a gradient that is not finite."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cory.errors import NotFinite
from cory.learners.update import Update
from cory.models.rollout import Rollout
from cory.parallel.devices import to_device

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

    Each is read alone, as rows that share a prompt may be read as one.
    """
    old = update.old
    finite = torch.stack([old.logprobs, old.values, old.kl]).isfinite().all(0).all(1)
    rows = set((~finite).nonzero().flatten().tolist())
    for row in indices:
        new = learner.passes.forward(update.batch.select([row]))
        numbers = new.logprobs if new.values is None else new.logprobs + new.values
        if not numbers.isfinite().all():
            rows.add(row)
    return rows


def _rows_of_gradient(learner: "Learner", update: Update, indices: list[int]) -> set[int]:
    """The rows of a mini-batch whose gradient is not finite.

    Each is read alone, as rows that share a prompt may be read as one. The gradient asked for is
    that of the embedded tokens, which the backward pass reaches last, and to which a number that is
    not finite comes through. No gradient of a weight is made, so nothing is exchanged between
    processes that hold whole agents.
    """
    rows: set[int] = set()
    embedded: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        embedded.append(output.requires_grad_())  # below adapters nothing is trained

    tokens = torch.tensor(sum(update.batch.response_lengths[row] for row in indices))
    tokens = to_device(tokens, learner.device)
    hook = learner.policy.get_input_embeddings().register_forward_hook(keep)
    try:
        for row in indices:
            alone = update.batch.select([row])
            with learner.accelerator.no_sync(learner.model):
                new = learner.passes.forward(alone)
                terms = learner.terms_of_rows(update, new, [row], alone, tokens, len(indices))
                (gradient,) = torch.autograd.grad(terms.loss, embedded.pop())
            if not gradient.isfinite().all():
                rows.add(row)
    finally:
        hook.remove()
    return rows


def _error(what: str, rollouts: Sequence[Rollout], rows: set[int]) -> NotFinite:
    """The error that names agent, role, rows and text. `rows`: of the batch, one rollout after the other."""
    agent = rollouts[0].agent
    start = 0
    for rollout in rollouts:
        end = start + len(rollout.prompts)
        bad_rows = sorted(row - start for row in rows if start <= row < end)
        if bad_rows:
            text = f"{rollout.prompts[bad_rows[0]]!r} -> {rollout.completions[bad_rows[0]]!r}"
            return NotFinite(what, f"{agent} as {rollout.role}", bad_rows, text)
        start = end
    return NotFinite(what, f"{agent} as {' and '.join(rollout.role for rollout in rollouts)}")
