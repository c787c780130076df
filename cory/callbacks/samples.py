"""Texts to read: samples.jsonl, and responses to fixed queries before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from cory.agent import Agent
from cory.callbacks.callback import Callback
from cory.iteration import Batch, Iteration
from cory.models.rollout import Rollout
from cory.prompts import text_of
from cory.run.clock import timed
from cory.streams import Purpose

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer

NUM_QUERIES = 4  # whose responses are shown before and after training, and in samples.jsonl


class Samples(Callback):
    """Every `sample_every` iterations, the responses to a few of its queries: `iteration.samples`, samples.jsonl."""

    def __init__(self) -> None:
        self.before: dict[str, list[dict[str, Any]]] = {}  # training, see `fixed_samples`

    def state_dict(self) -> dict[str, Any]:
        return self.before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        if not self.before:  # else the run was resumed
            self.before = fixed_samples(trainer)

    def on_update_begin(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        # Before the update, as the KL is that of the policy that has sampled.
        every = trainer.config.sample_every
        if not every or iteration.index % every:
            return
        # Of each group of chains that answer the same query, the first.
        group_size = trainer.config.chains_per_query
        rows = slice(0, NUM_QUERIES * group_size, group_size)
        described = describe(
            iteration.chain,
            iteration.batch.columns,
            iteration.rollouts,
            iteration.task_rewards,
            rows,
            trainer.task.prompts.columns(),
            iteration.team_rewards,
        )
        iteration.samples = [{"iteration": iteration.index, **sample} for sample in described]

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        if iteration.samples:
            with timed(iteration.seconds, "log"):
                trainer.run.write("samples", iteration.samples)

    def on_train_end(self, trainer: CoryTrainer, run: Run) -> None:
        run.summary["samples"] = {"before": self.before, "after": fixed_samples(trainer)}


def fixed_samples(trainer: CoryTrainer) -> dict[str, list[dict[str, Any]]]:
    """Responses to a few fixed queries: each agent's, solo, and as `chain` those of the run's first chain.

    Solo an agent reads the first role's prompt. Where the roles are fixed and have prompts of their own, the agents of
    later roles never learn to answer that, and have no solo responses.
    """
    config = trainer.config
    rows = min(NUM_QUERIES, len(trainer.task.dataset))
    batch = Batch(trainer.task.dataset[:rows], config.sampling.max_new_tokens)

    first_chain = [trainer.agents[index] for index in trainer.schedule.order(0)]
    own_prompts = any(role.prompt is not None for role in config.roles)
    solo = trainer.agents
    if own_prompts and not config.cory.exchanges_roles:
        solo = first_chain[:1]
    chains = {agent.name: [agent] for agent in solo}
    if config.cory.num_roles > 1:
        chains["chain"] = first_chain

    samples = {}
    for name, chain in chains.items():
        # All processes answer all of these queries, so they draw the same random numbers.
        generators = trainer.generators(Purpose.SAMPLES, chain, rank=0)
        rollouts = trainer.roll_out(chain, batch, generators)
        task_rewards = [scores.total for scores in trainer.score_rollouts(batch, rollouts)]
        samples[name] = describe(
            chain,
            batch.columns,
            rollouts,
            task_rewards,
            slice(None),
            trainer.task.prompts.columns(),
            trainer.score_chains(batch, rollouts),
        )
    return samples


def describe(
    chain: Sequence[Agent],
    columns: dict[str, list[Any]],
    rollouts: Sequence[Rollout],
    task_rewards: Sequence[torch.Tensor],
    rows: slice,
    read: Sequence[str],
    team_rewards: torch.Tensor | None = None,
) -> list[dict[str, Any]]:
    """By role, a record (docs/metrics.md, "Samples") of each response in `rows`; where chains branch, of the first.

    `read`: the columns that the prompts name besides the query.
    """
    queries = [text_of(prompt) for prompt in columns["prompt"][rows]]
    further = {name: columns[name][rows] for name in read}
    of_team = {}
    if team_rewards is not None:
        of_team = {
            "team_reward": team_rewards[_first_branches(rows, rollouts[-1].branches)].tolist()
        }
    samples = []
    for agent, rollout, rewards in zip(chain, rollouts, task_rewards, strict=True):
        rows_of_role = _first_branches(rows, rollout.branches)
        shown = rollout.rows(rows_of_role)
        shown_rewards = {"task_reward": rewards[rows_of_role].tolist(), **of_team}
        kls = agent.response_kls(shown)
        for row, query in enumerate(queries):
            sample = {
                "agent": agent.name,
                "role": rollout.role,
                "query": query,
                "columns": {name: values[row] for name, values in further.items()},
                "prompt": shown.prompts[row],
                "completion": shown.completions[row],
                **{name: values[row] for name, values in shown_rewards.items()},
                "kl": kls[row],
            }
            samples.append(sample)
    return samples


def _first_branches(rows: slice, branches: int) -> slice:
    """The rows of a role with so many responses where the role before has one."""
    stop = None if rows.stop is None else rows.stop * branches
    return slice(0, stop, (rows.step or 1) * branches)
