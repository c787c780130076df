"""The data that agents exchange: batches of queries, and responses to them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

T = TypeVar("T")
# The fields of `Rollout` with one entry per row; optional ones may be empty.
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
    """One agent's responses to a batch: lists of equal length, one entry per row.

    Args:
        prompts: the agent's prompts, text or chat messages.
        completions: the responses as text.
        prompt_ids, response_ids: token ids as 1-d tensors, on the CPU.
        logprobs: log-probabilities of the response tokens as 1-d tensors, from the engine that sampled them; empty
            without an engine.
        logits: logits (vocabulary,) of each response token, before temperature, top-k and the like; empty if they were
            not kept.
        agent: name of the agent.
        role: name of the agent's role, its position in the chain of agents: pioneer, observer, ...
        finished: whether each response ended by itself, not at its length limit.
    """

    prompts: list[Any]
    completions: list[str]
    prompt_ids: list[Tensor]
    response_ids: list[Tensor]
    logprobs: list[Tensor] = field(default_factory=list)
    logits: list[list[Tensor]] = field(default_factory=list)
    agent: str = ""
    role: str = ""
    finished: list[bool] = field(default_factory=list)

    def rows(self, index: slice) -> "Rollout":
        """Returns the rows in a slice."""
        return replace(self, **{name: getattr(self, name)[index] for name in COLUMNS})


def joined(rollouts: Sequence[Rollout], order: Sequence[int]) -> Rollout:
    """Joins several rollouts of an agent, with their rows in the given order."""
    columns: dict[str, Any] = {
        name: [*chain.from_iterable(getattr(rollout, name) for rollout in rollouts)]
        for name in COLUMNS
    }
    for name, rows in columns.items():
        columns[name] = [rows[row] for row in order] if rows else []
    return replace(rollouts[0], **columns)


class Batch(NamedTuple):
    """Queries to answer.

    Args:
        columns: the dataset's columns, with one row per response of the first role.
        max_new_tokens: length limit of responses, for roles without a limit of their own.
        branch_columns: the same columns, with one row per response of later roles. Later roles have more responses if
            the observer answers each pioneer response several times (`Config.branches`). None: the same as `columns`.
    """

    columns: dict[str, list[Any]]
    max_new_tokens: int
    branch_columns: dict[str, list[Any]] | None = None

    def columns_of(self, role: int) -> dict[str, list[Any]]:
        """Returns the columns with one row per response of `role`."""
        return dict(self.columns if role == 0 else self.branch_columns or self.columns)

    def earlier_responses(self, role: int, rollouts: Sequence[Rollout]) -> list[list[str]]:
        """Returns the responses of each role before `role`, with one row per response of `role`."""
        rows = len(self.columns_of(role)["prompt"])
        return [
            repeated(rollout.completions, rows // len(rollout.completions))
            for rollout in rollouts[:role]
        ]


def repeated(values: Sequence[T], times: int) -> list[T]:
    """Repeats each value `times` times, consecutively."""
    return [value for value in values for _ in range(times)]
