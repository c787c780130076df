"""What comes of an iteration."""

from dataclasses import dataclass, field
from typing import Any

import torch

from cory.agent import Agent
from cory.learners.records import UpdateStats
from cory.rollout import Batch, Rollout


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
