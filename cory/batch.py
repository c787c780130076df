"""The queries that a chain answers at a time."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from cory.models.rollout import Rollout

T = TypeVar("T")


class Batch(NamedTuple):
    """Queries to answer.

    columns: of the task's data, a row for each response of the first role. max_new_tokens: longest response of roles
    without a limit of their own. branches: responses of the second role to each of the first (`Config.branches`).
    branch_columns: a row for each response of the second role, where the rows of a query differ
    (`Task.rows_per_query`); `columns` has the first row of each query. None: branches have the row of their query.
    """

    columns: dict[str, list[Any]]
    max_new_tokens: int
    branches: int = 1
    branch_columns: dict[str, list[Any]] | None = None

    def branches_of(self, role: int) -> int:
        """How many rows of a role answer the same response of the role before."""
        # Only two-role chains branch: `Config.check` refuses others.
        return self.branches if role == 1 else 1

    def columns_of(self, role: int) -> dict[str, list[Any]]:
        """The columns with a row for each response of a role."""
        if role == 1 and self.branch_columns is not None:
            return dict(self.branch_columns)
        return {
            name: repeated(values, self.branches_of(role)) for name, values in self.columns.items()
        }

    def earlier_responses(self, role: int, rollouts: Sequence[Rollout]) -> list[list[str]]:
        """The responses of each role before `role`, with a row for each response of `role`."""
        return [
            repeated(rollout.completions, self.branches_of(role)) for rollout in rollouts[:role]
        ]


def repeated(values: Sequence[T], times: int) -> list[T]:
    """Each of the values so many times, one after the other."""
    return [value for value in values for _ in range(times)]
