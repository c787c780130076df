"""What an iteration starts from, and what comes of it."""

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cory.agent import Agent
from cory.learners.stats import UpdateStats
from cory.models.rollout import Rollout


class Batch(NamedTuple):
    """Queries to answer: the columns of the task's data, and the maximum length of a response in tokens."""

    columns: dict[str, list[Any]]
    max_new_tokens: int


@dataclass
class Iteration:
    """What happened in one iteration, as callbacks see it.

    What is listed by role has the order of the chain: the pioneer's comes first. Of several processes that share the
    batch, each has its own rows in `columns`, `rollouts`, `task_rewards`, `rewards` and
    `rewards_by_function`; `stats`, `records` and `eval_task_rewards` are over all of them.

    Args:
        index: from 0.
        chain: the agents by role; `chain[0]` is the pioneer.
        columns: the dataset's columns of this iteration's queries.
        max_new_tokens: the limit of this iteration's responses.
        rollouts: each role's prompts and responses.
        task_rewards: r_i of each role, (batch,).
        rewards: what each role is trained on (Eq. 4), (batch,).
        rewards_by_function: of several reward functions, what each gave each role's responses, (batch,), nan for None.
        stats: of each role's update; empty before it.
        seconds: by phase, so far.
        started: when the iteration began, by `time.perf_counter`.
        samples: lines of samples.jsonl, where they are due; from the callback `Samples`.
        eval_task_rewards: each role's mean task reward on held-out queries, where they are due; from `HeldOut`.
        records: lines of metrics.jsonl, one per role, in the order of the agents; from `Metrics`.
        timings: the line of timings.jsonl; from `Timings`.
    """

    index: int
    chain: list[Agent]
    columns: dict[str, list[Any]]
    max_new_tokens: int
    rollouts: list[Rollout]
    task_rewards: list[torch.Tensor]
    rewards: list[torch.Tensor]
    rewards_by_function: list[dict[str, torch.Tensor]] = field(default_factory=list)
    stats: list[UpdateStats] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    samples: list[dict[str, Any]] = field(default_factory=list)
    eval_task_rewards: list[float] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
