"""Callbacks: what watches a run. The loop in `cory/trainer.py` does not know what they do."""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import datasets
from tqdm import tqdm

from cory.agent import Agent
from cory.chain import Chain, role_generators
from cory.code_files import as_list, load
from cory.config import Config
from cory.errors import UserError, counted
from cory.hub import model_card
from cory.identity import row_keys, share_in_training
from cory.iteration import Iteration
from cory.metrics import HELD_OUT_REWARDS
from cory.parallel import distributed
from cory.rewards import score_rollouts, score_team
from cory.rollout import Batch
from cory.run.folder import BEST, SUMMARY, filled, write_text
from cory.run.measure import MEANING, NUM_QUERIES, describe, peak_memory_mb
from cory.run.report import write_run_report
from cory.run.tables import (
    ended_early,
    sample_table,
    summarise,
    summarise_roles,
    summary_table,
)
from cory.settings import yaml_text
from cory.streams import Purpose

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.task import Task
    from cory.trainer import CoryTrainer

# Of the progress bar; leaves a line of 80 for two agents.
LAYOUT = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
LINES = 10  # about so many are printed where there is no terminal, besides the first


class Callback:
    """Code at fixed points of a run. Override what you need and pass it to `CoryTrainer(..., callbacks=[...])`.

    All methods are called in every process. `trainer` has the run's `config`, `agents`, `task`,
    `schedule` and, while it trains, `run`. `trainer.should_stop = True`, in any process, saves the
    state and ends the run after the current iteration.

    An error that a method raises ends the run, with its traceback, the newest checkpoint and the command that continues
    from there.
    """

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        """Before the first iteration, also of a resumed run. `run.folder` is the run's folder."""

    def on_iteration_begin(self, trainer: CoryTrainer, k: int) -> None:
        """Before iteration `k`, from 0. `trainer.schedule.order(k)` says which agent has which role."""

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        """After an iteration, before its lines are written: what is added to one of `iteration.records`, a record per
        role (docs/metrics.md), stands in metrics.jsonl.
        """

    def on_train_end(self, trainer: CoryTrainer, run: Run) -> None:
        """After the last iteration, when agents, summary and report are saved; not after a failure or a signal."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint saves of the callback: values that JSON has."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned, when a run continues; called before `on_train_begin`."""


def load_callbacks(names: list[str] | str) -> list[Callback]:
    """An object of each class that settings name: `callbacks: FILE.py:NAME`.

    Raises a UserError: a file is missing or fails, or it defines no such class, or one that is no
    callback.
    """
    callbacks = []
    for name in as_list(names):
        kind = load("callbacks", name).value
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise UserError(
                f"callbacks: expected a class derived from cory.Callback, got {name} = {kind!r}"
            )
        callbacks.append(kind())
    return callbacks


class HeldOut(Callback):
    """Before training and every `eval_every` iterations, rewards on held-out queries: adds `eval_task_reward` and
    `eval_team_reward` to the records, and those before training to the first iteration's, as
    `eval_task_reward_before` and `eval_team_reward_before`.

    The iteration's chain answers them, with the same random numbers each time. Training does not
    notice, as its random numbers are others.

    Attributes:
        before: by role, the rewards before training by name; of a run that is continued, empty.
        latest: the newest rewards by name, means over the roles; empty before any.
        measured_at: after how many iterations.
    """

    def __init__(self) -> None:
        self.before: dict[str, dict[str, float]] = {}
        self.latest: dict[str, float] = {}
        self.measured_at = 0
        self.seconds = 0.0  # since the last line of timings.jsonl

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
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

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
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

    def _measure(self, trainer: CoryTrainer, chain: Chain) -> dict[str, dict[str, float]]:
        """Each role's rewards by name."""
        started = time.perf_counter()
        assert trainer.eval_dataset is not None
        task_rewards, team_reward = mean_rewards(chain, trainer.eval_dataset, trainer.config)
        of_team = {} if team_reward is None else {"eval_team_reward": team_reward}
        by_role = {
            trainer.task.prompts.name(role): {"eval_task_reward": reward, **of_team}
            for role, reward in enumerate(task_rewards)
        }
        self.latest = held_out_rewards(list(by_role.values()))
        self.measured_at = trainer.state.iteration
        self.seconds += time.perf_counter() - started
        return by_role


def mean_rewards(
    chain: Chain, dataset: datasets.Dataset, config: Config
) -> tuple[list[float], float | None]:
    """Returns each role's mean task reward on the rows of a dataset, and the mean team reward; None without one."""
    task = chain.task
    rank, world_size = distributed.rank(), distributed.world_size()
    own_rows = list(range(len(dataset))[rank::world_size])
    batch_size = config.ppo.batch_size // world_size

    num_roles = len(chain.agents)
    generators = role_generators(config.seed, Purpose.HELD_OUT, num_roles, rank=rank)
    task_rewards: list[list[float]] = [[] for _ in range(num_roles)]
    team_rewards: list[float] = []
    for start in range(0, len(own_rows), batch_size):
        batch = Batch(dataset[own_rows[start : start + batch_size]], config.sampling.max_new_tokens)
        rollouts = chain.roll_out(batch, generators)
        for role, scores in enumerate(score_rollouts(task.reward, batch, rollouts)):
            task_rewards[role] += scores.total.tolist()
        of_team = score_team(task.team, batch, rollouts)
        if of_team is not None:
            team_rewards += of_team.tolist()
    means = [statistics.fmean(distributed.gather_rows(rewards)) for rewards in task_rewards]
    if task.team is None:
        return means, None
    return means, statistics.fmean(distributed.gather_rows(team_rewards))


def held_out_rows(
    config: Config, task: Task, dataset: datasets.Dataset | None
) -> datasets.Dataset | None:
    """The first `eval_queries` rows, equally many for each process; None without `eval_every`.

    Raises a UserError: there are none, or they do not fit the task.
    """
    if dataset is not None:
        try:
            task.check_rows(dataset)  # all, as an evaluation after the run reads them
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


class Samples(Callback):
    """Responses to a few fixed queries before and after training, in summary.json."""

    def __init__(self) -> None:
        self.before: dict[str, list[dict[str, Any]]] = {}  # training, see `fixed_samples`

    def state_dict(self) -> dict[str, Any]:
        return self.before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state

    def on_iteration_begin(self, trainer: CoryTrainer, k: int) -> None:
        if not self.before:  # before the first update
            self.before = fixed_samples(trainer)

    def on_train_end(self, trainer: CoryTrainer, run: Run) -> None:
        run.summary["samples"] = {"before": self.before, "after": fixed_samples(trainer)}


def fixed_samples(trainer: CoryTrainer) -> dict[str, list[dict[str, Any]]]:
    """Responses to a few fixed queries: each agent's, solo, and as `chain` those of the run's first chain.

    Solo an agent reads the first role's prompt. Where the roles are fixed and have prompts of their own, the agents of
    later roles never learn to answer that, and have no solo responses.
    """
    config = trainer.config
    size = trainer.task.rows_per_query(config.branches)
    queries = min(NUM_QUERIES, len(trainer.task.dataset) // size)
    rows = [query * size + query % size for query in range(queries)]  # one of each query
    batch = Batch(trainer.task.dataset[rows], config.sampling.max_new_tokens)

    first_chain = trainer.chain(0)
    own_prompts = any(role.prompt is not None for role in config.roles)
    solo = trainer.agents
    if own_prompts and config.cory.exchange_period == 0:
        solo = list(first_chain.agents[:1])
    chains = {agent.name: Chain([agent], trainer.task) for agent in solo}
    if config.cory.num_roles > 1:
        chains["chain"] = first_chain

    samples = {}
    for name, chain in chains.items():
        # All processes answer all of these queries, so they draw the same random numbers.
        num_roles = len(chain.agents)
        generators = role_generators(config.seed, Purpose.SAMPLES, num_roles)
        whole = num_roles == config.cory.num_roles  # else it has no team reward
        rollouts = chain.roll_out(batch, generators)
        scores = score_rollouts(trainer.task.reward, batch, rollouts)
        task_rewards = [of_role.total for of_role in scores]
        samples[name] = describe(
            chain.agents,
            batch.columns,
            rollouts,
            task_rewards,
            slice(None),
            trainer.task.columns_read(),
            score_team(trainer.task.team, batch, rollouts) if whole else None,
        )
    return samples


class Guards(Callback):
    """Prints what a flag means when it is raised for the first time, and ends the run when a role's KL to the reference
    exceeds `guards.stop_at_kl`, in nats per response.
    """

    def __init__(self) -> None:
        self.printed: set[str] = set()

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        for record in iteration.records:
            for flag in record["flags"]:
                if flag in self.printed:
                    continue
                self.printed.add(flag)
                meaning = MEANING[flag].format(**record)
                trainer.run.say(
                    f"Iteration {iteration.index + 1}, {record['agent']} as {record['role']}: {meaning}"
                )

        bound = trainer.config.guards.stop_at_kl
        if bound is not None and any(record["kl"] > bound for record in iteration.records):
            trainer.run.say(f"KL is above guards.stop_at_kl = {bound:g}.")
            trainer.state.stopped_by = "guards.stop_at_kl"
            trainer.should_stop = True


class EarlyStopping(Callback):
    """Ends a run after `guards.patience` held-out evaluations without a better reward: the task reward, mean over the
    roles, plus the team reward, if there is one.

    Whenever that reward is the best so far, the agents are saved in RUN/best. That before training is the first.

    Args:
        held_out: has measured it.

    Attributes:
        best: the evaluation with the largest reward so far: `iterations`, and its rewards by name; empty before the
            first one.
        waited: evaluations since then.
    """

    def __init__(self, held_out: HeldOut) -> None:
        self.held_out = held_out
        self.best: dict[str, float] = {}
        self.waited = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.waited = state["waited"]

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        if trainer.config.guards.patience is not None and self.held_out.before:
            self._keep(trainer)

    def _keep(self, trainer: CoryTrainer) -> None:
        """Saves the agents and their newest rewards as the best."""
        self.best = {"iterations": trainer.state.iteration, **self.held_out.latest}
        self.waited = 0
        save_agents(trainer.run, trainer.agents, BEST, self.best)

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        patience = trainer.config.guards.patience
        if patience is None or "eval_task_reward" not in iteration.records[0]:
            return
        run = trainer.run
        largest = _sum_of_rewards(self.best)
        if _sum_of_rewards(self.held_out.latest) > largest:
            self._keep(trainer)
            return
        self.waited += 1
        if self.waited >= patience:
            waited = counted(patience, "evaluation")
            run.say(
                f"The held-out reward has not risen above {largest:.3f} in {waited} (guards.patience). "
                f"The best agents, of iteration {self.best['iterations']}, are in {run.folder / BEST}."
            )
            trainer.state.stopped_by = "guards.patience"
            trainer.should_stop = True

    def on_train_end(self, trainer: CoryTrainer, run: Run) -> None:
        if self.best:
            run.summary["best"] = self.best


def held_out_rewards(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The held-out rewards of an evaluation by name: means over the records, one for each role."""
    return {
        name: statistics.fmean(record[name] for record in records)
        for name in HELD_OUT_REWARDS
        if name in records[0]
    }


def _sum_of_rewards(rewards: Mapping[str, float]) -> float:
    return sum(rewards[name] for name in HELD_OUT_REWARDS if name in rewards)


class Progress(Callback):
    """Shows each agent's role, reward (task reward plus team reward) and KL, and the newest held-out reward, mean over
    the roles.

    Args:
        held_out: has measured it.
    """

    bar: tqdm

    def __init__(self, held_out: HeldOut) -> None:
        self.held_out = held_out

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        hidden = not (run.writes and sys.stderr.isatty())
        self.bar = tqdm(
            total=trainer.config.iterations,
            initial=len(run.seconds),
            bar_format=LAYOUT,
            disable=hidden,
            dynamic_ncols=True,
        )
        run.exits.callback(self.bar.close)

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        if not trainer.run.writes:
            return
        text = progress_line(iteration.records)
        if self.held_out.latest:
            # In the first line the reward before training, to which later ones compare.
            before = list(self.held_out.before.values()) if iteration.index == 0 else []
            rewards = held_out_rewards(before) if before else self.held_out.latest
            measured_at = 0 if before else self.held_out.measured_at
            text += f" | held out after {measured_at}: {_sum_of_rewards(rewards):+.2f}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()

        done, total = iteration.index + 1, trainer.config.iterations
        is_due = done in (1, total) or done % max(1, total // LINES) == 0
        is_due = is_due or "eval_task_reward" in iteration.records[0]
        if self.bar.disable and is_due:
            print(
                f"iteration {done}/{total} | {text} | {iteration.timings['seconds_total']:.2f} s/it",
                flush=True,
            )

    def on_train_end(self, trainer: CoryTrainer, run: Run) -> None:
        self.bar.close()


def progress_line(records: Sequence[Mapping[str, Any]]) -> str:
    """One line on an iteration: each agent's name, role, task reward plus team reward, and KL; for more
    than two roles, their means.
    """
    rewards = [record["task_reward"] + record.get("team_reward", 0.0) for record in records]
    if len(records) > 2:
        kl = statistics.fmean(record["kl"] for record in records)
        return f"{len(records)} roles: reward {statistics.fmean(rewards):+.2f} KL {kl:.2f}"
    return " | ".join(
        f"{record['agent']} {record['role'][:3]} {reward:+.2f} KL {record['kl']:.2f}"
        for record, reward in zip(records, rewards, strict=True)
    )


class Results(Callback):
    """Saves frozen agents at the beginning, the others, curves, summary and report at the end, and
    prints the results.
    """

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        # A run that is continued has them already, and they do not change.
        if not run.resumed:
            save_agents(run, [agent for agent in trainer.agents if not agent.is_trained])

    def on_train_end(self, trainer: CoryTrainer, run: Run) -> None:
        means = summarise(run.history, [agent.name for agent in trainer.agents])
        roles = summarise_roles(run.history)
        stopped = len(run.seconds) < trainer.config.iterations  # by a callback, such as Guards
        if stopped:
            run.summary["stopped_by"] = trainer.state.stopped_by
        summary = {
            "iterations": len(run.seconds),
            "stopped": stopped,
            "seconds_per_iteration": round(statistics.median(run.seconds), 4),
            "peak_memory_mb": round(peak_memory_mb(), 1),
            "roles": roles,
            "agents": means,
            **run.summary,
        }
        # Of a run that is extended: without a summary, it is not taken for finished while only some agents are new.
        if run.writes:
            (run.folder / SUMMARY).unlink(missing_ok=True)
        save_agents(run, trainer.trained_agents)
        if not run.writes:
            return

        for agent in trainer.agents:
            folder = run.folder / agent.name
            card = model_card(
                {agent.name: folder}, trainer.config, run.record["fingerprint"], len(run.seconds)
            )
            write_text(folder / "README.md", card)
        note = ended_early(summary, trainer.config.iterations)
        _draw_curves(run, trainer.task.prompts.name(0), note)
        write_text(run.folder / SUMMARY, json.dumps(summary, indent=2))
        write_run_report(run.folder, trainer.config.method())
        print(summary_table(means, roles))
        print(sample_table(**summary["samples"]))
        speed = f"{summary['seconds_per_iteration']:.2f} s per iteration"
        best = ""
        if summary["stopped"] and "best" in summary:
            best = f", the best agents in {run.folder / BEST}"
        print(
            f"\n{speed}. Curves, samples and agents are in {run.folder}{best}; report.html shows them"
        )


def save_agents(
    run: Run,
    agents: Sequence[Agent],
    subfolder: str = "",
    summary: Mapping[str, Any] | None = None,
) -> None:
    """Saves agents in the run's folder, or one in it, in the place of those before. All processes must call this.

    With a `summary`, the subfolder is read as a run's: it has the settings, too.
    """
    # The others only help to put sharded agents together.
    with filled(run.folder) if run.writes else nullcontext(run.folder) as unfinished:
        for agent in agents:
            agent.save(unfinished / subfolder / agent.name)
        if summary is not None and run.writes:
            write_text(unfinished / subfolder / "config.yaml", yaml_text(run.record))
            write_text(unfinished / subfolder / SUMMARY, json.dumps(summary, indent=2))


def _draw_curves(run: Run, first_role: str, note: str) -> None:
    try:
        from cory.run.plots import plot_curves  # here, as importing matplotlib takes a while

        plot_curves(run.history, run.folder / "curves.png", first_role, note)
    except Exception as error:
        warnings.warn(f"curves.png could not be drawn ({error}); all else is saved", stacklevel=2)
