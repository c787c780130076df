"""The queries that a chain answers at a time."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from cory.models.rollout import Rollout

T = TypeVar("T")


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
