"""Measures rewards on held-out queries during training. `cory/evaluation` also measures KL, after training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from cory.chain import Chain, role_generators
from cory.config import Config
from cory.errors import UserError
from cory.identity import row_keys, share_in_training
from cory.iteration import Iteration
from cory.metrics import HELD_OUT_REWARDS
from cory.parallel import distributed
from cory.rewards import score_rollouts, score_team
from cory.rollout import Batch
from cory.run.callback import Callback, Trainer
from cory.run.folder import Run
from cory.streams import Purpose
from cory.task import Task


class HeldOut(Callback):
    """Measures rewards on held-out queries before training and every `eval_every` iterations.

    Adds `eval_task_reward` and `eval_team_reward` to the records. The first iteration's records also get the rewards
    before training, as `eval_task_reward_before` and `eval_team_reward_before`.

    The agents answer in the roles that they hold in the iteration, with the same random numbers every time (a vLLM
    server draws its own). Training is unaffected, because it draws from other random streams.

    Attributes:
        before: rewards before training, by role and name; empty if the run was resumed.
        latest: the latest rewards by name, averaged over roles; empty before the first evaluation.
        measured_at: the number of iterations trained before the latest evaluation.
    """

    def __init__(self) -> None:
        self.before: dict[str, dict[str, float]] = {}
        self.latest: dict[str, float] = {}
        self.measured_at = 0
        self.seconds = 0.0  # spent on evaluations since the last line of timings.jsonl

    def on_train_begin(self, trainer: Trainer, run: Run) -> None:
        if trainer.eval_dataset is None:
            return
        queries = trainer.eval_dataset[:]
        distinct = len(set(row_keys(queries)))
        share = share_in_training(queries, trainer.task.dataset[:])
        run.say(
            f"eval_every: {len(trainer.eval_dataset)} held-out queries ({distinct} distinct), "
            f"{100 * share:.3g} % of them also in training"
        )
        if trainer.state.iteration == 0:
            self.before = self._measure(trainer, trainer.chain(0))

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        if trainer.eval_dataset is None:
            return
        if iteration.index == 0:
            for record in iteration.records:
                for name, reward in self.before[record["role"]].items():
                    record[f"{name}_before"] = reward
        if (iteration.index + 1) % trainer.config.eval_every == 0:
            by_role = self._measure(trainer, trainer.chain(iteration.index))
            for record in iteration.records:
                record |= by_role[record["role"]]
        if self.seconds:
            iteration.timings["seconds_evaluate"] = round(self.seconds, 6)
            self.seconds = 0.0

    def _measure(self, trainer: Trainer, chain: Chain) -> dict[str, dict[str, float]]:
        """Returns the rewards by role and name."""
        started = time.perf_counter()
        assert trainer.eval_dataset is not None
        task_rewards, team_reward = mean_rewards(chain, trainer.eval_dataset, trainer.config)
        shared = {} if team_reward is None else {"eval_team_reward": team_reward}
        by_role = {
            trainer.task.prompts.name(role): {"eval_task_reward": reward, **shared}
            for role, reward in enumerate(task_rewards)
        }
        self.latest = held_out_rewards(list(by_role.values()))
        self.measured_at = trainer.state.iteration
        self.seconds += time.perf_counter() - started
        return by_role


def mean_rewards(
    chain: Chain, dataset: Dataset, config: Config
) -> tuple[list[float], float | None]:
    """Returns each role's mean task reward on a dataset, and the mean team reward (None if the task has none)."""
    task = chain.task
    rank, world_size = distributed.rank(), distributed.world_size()
    rank_rows = list(range(len(dataset))[rank::world_size])
    batch_size = config.ppo.batch_size // world_size

    num_roles = len(chain.agents)
    generators = role_generators(config.seed, Purpose.HELD_OUT, num_roles, rank=rank)
    task_rewards: list[list[float]] = [[] for _ in range(num_roles)]
    team_rewards: list[float] = []
    for start in range(0, len(rank_rows), batch_size):
        batch_rows = rank_rows[start : start + batch_size]
        batch = Batch(dataset[batch_rows], config.sampling.max_new_tokens)
        rollouts = chain.roll_out(batch, generators)
        for role, scores in enumerate(score_rollouts(task.reward, batch, rollouts)):
            task_rewards[role] += scores.total.tolist()
        team_scores = score_team(task.team, batch, rollouts)
        if team_scores is not None:
            team_rewards += team_scores.tolist()
    means = [statistics.fmean(distributed.gather_rows(rewards)) for rewards in task_rewards]
    if task.team is None:
        return means, None
    return means, statistics.fmean(distributed.gather_rows(team_rewards))


def held_out_rows(config: Config, task: Task, dataset: Dataset | None) -> Dataset | None:
    """Returns the first `eval_queries` rows, rounded down to equally many per process; None if `eval_every` is 0.

    Raises a UserError: there are no rows, or they do not fit the task.
    """
    if dataset is not None:
        try:
            task.check_rows(dataset)  # all rows, because an evaluation after the run reads all
        except UserError as error:
            raise UserError(f"held-out rows: {error}") from None
    if not config.eval_every:
        return None
    available = 0 if dataset is None else len(dataset)
    count = distributed.even(min(config.eval_queries, available))
    if dataset is None or count == 0:
        raise UserError(
            f"eval_every: expected an eval_dataset with a row for each process, got {available} rows"
        )
    return dataset.select(range(count))


def held_out_rewards(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns an evaluation's rewards by name, averaged over the roles' records."""
    return {
        name: statistics.fmean(record[name] for record in records)
        for name in HELD_OUT_REWARDS
        if name in records[0]
    }


def sum_of_rewards(rewards: Mapping[str, float]) -> float:
    return sum(rewards[name] for name in HELD_OUT_REWARDS if name in rewards)
