"""What an iteration starts from, and what comes of it."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from cory.agent import Agent
from cory.batch import Batch, repeated
from cory.config import Config
from cory.learners.records import UpdateStats
from cory.models.rollout import Rollout
from cory.parallel import distributed
from cory.streams import response_limit
from cory.task import Task


def draw_batch(task: Task, config: Config, k: int) -> Batch:
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
