"""A batch of responses of one agent: what it reads, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from torch import Tensor

# With an entry per row, or none.
COLUMNS = (
    "prompts",
    "completions",
    "prompt_ids",
    "response_ids",
    "logprobs",
    "logits",
    "finished",
)


@dataclass
class Rollout:
    """A batch of responses of one agent: lists of equal length, one entry per row.

    Args:
        prompts: what the agent read, text or chat messages.
        completions: the text of its responses.
        prompt_ids, response_ids: token ids as 1-d tensors, always on the CPU; `window.pack`
            moves a batch to the learner's device.
        logprobs: 1-d tensors, of the response tokens, by the engine that sampled them; empty
            without an engine.
        logits: of each response's tokens, (vocabulary,) each, as they were before warping; empty
            where they were not kept.
        agent: name of the agent.
        role: name of its role in the chain.
        branches: how many rows, one after the other, answer the same response of the role before
            (`Config.branches`).
        finished: of each row, whether its response ended by itself, and was not cut at its limit.
            Only DAPO's learner needs it.
    """

    prompts: list[Any]
    completions: list[str]
    prompt_ids: list[Tensor]
    response_ids: list[Tensor]
    logprobs: list[Tensor] = field(default_factory=list)
    logits: list[list[Tensor]] = field(default_factory=list)
    agent: str = ""
    role: str = ""
    branches: int = 1
    finished: list[bool] = field(default_factory=list)

    def rows(self, index: slice) -> "Rollout":
        """Some of its rows."""
        return replace(self, **{name: getattr(self, name)[index] for name in COLUMNS})


def joined(rollouts: Sequence[Rollout], order: Sequence[int]) -> Rollout:
    """The rows of several rollouts of an agent in one, in this order."""
    columns: dict[str, Any] = {
        name: [*chain.from_iterable(getattr(one, name) for one in rollouts)] for name in COLUMNS
    }
    for name, rows in columns.items():
        columns[name] = [rows[row] for row in order] if rows else []
    return replace(rollouts[0], **columns)
