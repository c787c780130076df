"""What passes through a chain: the queries that it answers at a time, and the responses of each agent."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

T = TypeVar("T")
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
        finished: of each row, whether its response ended by itself, and was not cut at its limit.
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


class Batch(NamedTuple):
    """Queries to answer.

    columns: of the task's data, a row for each response of the first role. max_new_tokens: longest response of roles
    without a limit of their own. branch_columns: a row for each response of later roles, which are more where a chain
    branches (`Config.branches`); None: as many as of the first.
    """

    columns: dict[str, list[Any]]
    max_new_tokens: int
    branch_columns: dict[str, list[Any]] | None = None

    def columns_of(self, role: int) -> dict[str, list[Any]]:
        """The columns with a row for each response of a role."""
        return dict(self.columns if role == 0 else self.branch_columns or self.columns)

    def earlier_responses(self, role: int, rollouts: Sequence[Rollout]) -> list[list[str]]:
        """The responses of each role before `role`, with a row for each response of `role`."""
        rows = len(self.columns_of(role)["prompt"])
        return [
            repeated(rollout.completions, rows // len(rollout.completions))
            for rollout in rollouts[:role]
        ]


def repeated(values: Sequence[T], times: int) -> list[T]:
    """Each of the values so many times, one after the other."""
    return [value for value in values for _ in range(times)]
