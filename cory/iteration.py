"""The record of one iteration."""

from dataclasses import dataclass, field
from typing import Any

import torch

from cory.agent import Agent
from cory.learners.records import UpdateStats
from cory.rollout import Batch, Rollout


@dataclass
class Iteration:
    """Data and results of one iteration, as callbacks see them.

    Lists have one entry per role, in chain order: the pioneer, which answers first, then the observers. In shapes,
    `batch` is a role's number of responses. If several processes share a batch, `batch`, `rollouts` and the rewards
    hold only this process's rows, while `stats` and `records` cover all processes.

    Args:
        index: number of the iteration, from 0.
        chain: the agent in each role.
        batch: this iteration's queries.
        rollouts: each role's prompts and responses.
        task_rewards: each role's task rewards r_i, (batch,).
        rewards: each role's training rewards (Eq. 4), (batch,).
        team_rewards: the chains' team rewards, (batch,), one per response of the last role; None without a team reward.
        rewards_by_function: each role's rewards (batch,) by reward function, nan where a function returned None.
            Empty if there is a single function.
        samples: this iteration's lines of samples.jsonl; empty if no samples are recorded.
        stats: each role's update statistics.
        records: this iteration's lines of metrics.jsonl, one per role, sorted by agent.
        timings: this iteration's line of timings.jsonl.
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
