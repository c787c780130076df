"""Held-out evaluation while a run trains: `eval_every`, `eval_queries`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import datasets

from cory.callbacks.callback import Callback
from cory.iteration import Batch, Iteration
from cory.metrics import in_training
from cory.parallel import distributed
from cory.prompts import query_text
from cory.run.clock import timed
from cory.streams import Purpose

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer


class HeldOut(Callback):
    """Every `eval_every` iterations, rewards on held-out queries: `eval_task_rewards` and
    `eval_team_reward`.

    The iteration's chain answers them, with the same random numbers each time. Training does not
    notice, as its random numbers are others.
    """

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        if trainer.eval_dataset is None:
            return
        overlap = overlap_with_training(trainer.eval_dataset, trainer.task.dataset)
        run.summary["held_out"] = overlap
        run.say(
            f"eval_every: {overlap['queries']} held-out queries ({overlap['distinct']} distinct), "
            f"{100 * overlap['in_training']:.3g} % of them also in training"
        )

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        if trainer.eval_dataset is None or (iteration.index + 1) % trainer.config.eval_every:
            return
        with timed(iteration.seconds, "evaluate"):
            means = evaluate(trainer, iteration, trainer.eval_dataset)
            iteration.eval_task_rewards, iteration.eval_team_reward = means


def evaluate(
    trainer: CoryTrainer, iteration: Iteration, dataset: datasets.Dataset
) -> tuple[list[float], float | None]:
    """Each role's mean task reward on the rows of a dataset, which the iteration's chain answers,
    and the mean team reward; None without one.
    """
    config = trainer.config
    world_size = distributed.world_size()
    own_rows = list(range(len(dataset))[distributed.rank() :: world_size])
    batch_size = config.ppo.batch_size // world_size

    generators = trainer.generators(Purpose.HELD_OUT, iteration.chain)
    task_rewards: list[list[float]] = [[] for _ in iteration.chain]
    team_rewards: list[float] = []
    for start in range(0, len(own_rows), batch_size):
        batch = Batch(dataset[own_rows[start : start + batch_size]], config.sampling.max_new_tokens)
        rollouts = trainer.roll_out(iteration.chain, batch, generators)
        for role, scores in enumerate(trainer.score_rollouts(batch, rollouts)):
            task_rewards[role] += scores.total.tolist()
        of_team = trainer.score_chains(batch, rollouts)
        if of_team is not None:
            team_rewards += of_team.tolist()
    means = [statistics.fmean(distributed.gather_rows(rewards)) for rewards in task_rewards]
    if trainer.task.team is None:
        return means, None
    return means, statistics.fmean(distributed.gather_rows(team_rewards))


def overlap_with_training(
    held_out: datasets.Dataset, trained: datasets.Dataset
) -> dict[str, float]:
    """How many held-out queries there are, how many differ, and the share of them that is also in training."""
    held_out_queries = [query_text(prompt) for prompt in held_out["prompt"]]
    trained_queries = [query_text(prompt) for prompt in trained["prompt"]]
    return {
        "queries": len(held_out_queries),
        "distinct": len(set(held_out_queries)),
        "in_training": in_training(held_out_queries, trained_queries),
    }
