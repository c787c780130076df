"""Metrics of each iteration: metrics.jsonl. Formulas are in docs/metrics.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from cory.callbacks.callback import Callback
from cory.credit import per_response
from cory.iteration import Iteration
from cory.metrics import combined_reward, distinct
from cory.parallel import distributed
from cory.rewards import measure_responses
from cory.run.clock import timed
from cory.run.flags import flags

if TYPE_CHECKING:
    from cory.trainer import CoryTrainer


class Metrics(Callback):
    """Computes `iteration.records`, a record per role, and writes them to metrics.jsonl."""

    def on_update_begin(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        # Before the update, so that a function that fails costs no more than the rollouts.
        iteration.task_metrics = [
            of_task(trainer, iteration, role) for role in range(len(iteration.chain))
        ]

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        run = trainer.run
        with timed(iteration.seconds, "record"):
            iteration.records = measure(trainer, iteration, run.history)
        run.history += iteration.records
        with timed(iteration.seconds, "log"):
            run.write("metrics", iteration.records)


def measure(
    trainer: CoryTrainer, iteration: Iteration, history: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The metrics of an iteration over all processes: a record per role, in the order of the trainer's agents.

    `history`: the records of earlier iterations; collapse is judged against those of the first one.
    """
    kl_coef = trainer.config.ppo.init_kl_coef
    kl_bound = trainer.config.guards.kl_bound
    team_rewards = None
    if iteration.team_rewards is not None:
        team_rewards = torch.tensor(distributed.gather_rows(iteration.team_rewards.tolist()))
    first_records = {record["role"]: record for record in history[: len(iteration.chain)]}
    records = []
    for role, agent in enumerate(iteration.chain):
        completions = distributed.gather_rows(iteration.rollouts[role].completions)
        task_rewards = torch.tensor(distributed.gather_rows(iteration.task_rewards[role].tolist()))
        earned = task_rewards
        if team_rewards is not None:
            earned = task_rewards + per_response(team_rewards, like=task_rewards)
        update_stats = iteration.stats[role].metrics()
        kl = update_stats.pop("kl")
        record: dict[str, Any] = {
            "iteration": iteration.index,
            "agent": agent.name,
            "role": iteration.rollouts[role].role,
            "task_reward": task_rewards.mean().item(),
            **({} if team_rewards is None else {"team_reward": team_rewards.mean().item()}),
            "kl": kl,
            "combined_reward": combined_reward(earned.mean().item(), kl, kl_coef),
            **update_stats,
            "distinct_2": distinct(completions, 2),
        }
        record |= iteration.task_metrics[role]
        first_record = first_records.get(record["role"], record)
        trained_on = torch.tensor(distributed.gather_rows(iteration.rewards[role].tolist()))
        record["flags"] = flags(record, first_record, trained_on, completions, kl_bound)
        if iteration.eval_task_rewards:
            record["eval_task_reward"] = iteration.eval_task_rewards[role]
        if iteration.eval_team_reward is not None:
            record["eval_team_reward"] = iteration.eval_team_reward
        records.append(record)

    position = {agent.name: index for index, agent in enumerate(trainer.agents)}
    return sorted(records, key=lambda record: position[record["agent"]])


def of_task(trainer: CoryTrainer, iteration: Iteration, role: int) -> dict[str, float]:
    """What the task's metrics, and each of several reward functions, give a role's responses: means over those to which
    they apply. One that applies to none is left out.
    """
    rollout = iteration.rollouts[role]
    completions = rollout.completions
    columns = iteration.batch.columns_of(role)
    prompts = columns.pop("prompt")
    columns["role"] = [rollout.role] * len(completions)
    task_rewards = iteration.task_rewards[role].tolist()
    values = {
        f"reward_{name}": rewards.tolist()
        for name, rewards in iteration.rewards_by_function[role].items()
    }
    values |= measure_responses(trainer.task.metrics, prompts, completions, task_rewards, columns)
    means = {}
    for name, of_process in values.items():
        numbers = [
            number for number in distributed.gather_rows(of_process) if not math.isnan(number)
        ]
        if numbers:
            means[name] = statistics.fmean(numbers)
    return means
