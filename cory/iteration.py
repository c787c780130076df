"""What an iteration starts from, and what comes of it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from cory.agent import Agent
from cory.config import Config
from cory.learners.records import UpdateStats
from cory.models.rollout import Rollout
from cory.parallel import distributed
from cory.streams import response_limit

if TYPE_CHECKING:
    from cory.task import Task

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


def draw_batch(task: "Task", config: Config, k: int) -> Batch:
    """This process's part of the queries of iteration `k`, each as often as its group has chains."""
    rows_of_process = distributed.share_of_rows(config.ppo.batch_size // config.branches)

    def of_process(values: list[Any]) -> list[list[Any]]:
        """For each response of the first role, a column's values in the rows of its query."""
        size = task.rows_per_query
        queries = [values[start : start + size] for start in range(0, len(values), size)]
        return repeated(queries, config.chains_per_query)[rows_of_process]

    rows = task.batch(k, config.queries_per_iteration, config.seed)
    queries = {name: of_process(values) for name, values in rows.items()}
    columns = {name: [values[0] for values in column] for name, column in queries.items()}
    branch_columns = None
    if task.rows_per_query > 1:
        branch_columns = {name: list(itertools.chain(*column)) for name, column in queries.items()}

    sampling = config.sampling
    max_new_tokens = response_limit(
        config.seed, k, sampling.min_new_tokens, sampling.max_new_tokens
    )
    return Batch(columns, max_new_tokens, config.branches, branch_columns)


def repeated(values: Sequence[T], times: int) -> list[T]:
    """Each of the values so many times, one after the other."""
    return [value for value in values for _ in range(times)]


@dataclass
class Iteration:
    """What happened in one iteration, as callbacks see it.

    What is listed by role has the order of the chain: the pioneer's comes first; (batch,) are its responses. Of several
    processes that share the batch, each has its own rows in `batch`, `rollouts` and the rewards; `stats` and `records`
    are over all of them.

    Args:
        index: from 0.
        chain: the agents by role; `chain[0]` is the pioneer.
        batch: this iteration's queries: `batch.columns` are the dataset's columns.
        rollouts: each role's prompts and responses.
        task_rewards: r_i of each role, (batch,).
        rewards: what each role is trained on (Eq. 4), (batch,).
        team_rewards: of each chain, so one for each response of the last role, (batch,); None without a team reward.
        rewards_by_function: of several reward functions, what each gave each role's responses, (batch,), nan for None.
        samples: lines of samples.jsonl, where they are due.
        stats: of each role's update.
        records: lines of metrics.jsonl, one per role, in the order of the agents.
        timings: the line of timings.jsonl.
    """

    index: int
    chain: list[Agent]
    batch: Batch
    rollouts: list[Rollout]
    task_rewards: list[torch.Tensor]
    rewards: list[torch.Tensor]
    team_rewards: torch.Tensor | None = None
    rewards_by_function: list[dict[str, torch.Tensor]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    stats: list[UpdateStats] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, Any] = field(default_factory=dict)
