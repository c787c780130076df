"""The callbacks of every run. The loop in `cory/trainer.py` does not know them individually."""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from tqdm import tqdm

import cory.process as process
from cory.agent import Agent
from cory.chain import Chain, role_generators
from cory.errors import counted
from cory.iteration import Iteration
from cory.rewards import score_rollouts, score_team
from cory.rollout import Batch
from cory.run.callback import Callback, Trainer
from cory.run.card import model_card
from cory.run.folder import BEST, SUMMARY, Run, filled, write_text
from cory.run.held_out import HeldOut, held_out_rewards, sum_of_rewards
from cory.run.measure import MEANING, NUM_QUERIES, describe, peak_memory_mb
from cory.run.report import run_page, write_report
from cory.run.tables import (
    ended_early,
    sample_table,
    summarise,
    summarise_roles,
    summary_table,
)
from cory.settings import yaml_text
from cory.streams import Purpose

# The progress bar's format, short enough for two agents on a line of 80 characters.
LAYOUT = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
LINES = 10  # without a terminal, about this many progress lines are printed after the first


class Samples(Callback):
    """Responses to a few fixed queries before and after training, in summary.json."""

    def __init__(self) -> None:
        self.before: dict[str, list[dict[str, Any]]] = {}  # `fixed_samples` before training

    def state_dict(self) -> dict[str, Any]:
        return self.before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state

    def on_iteration_begin(self, trainer: Trainer, k: int) -> None:
        if not self.before:  # before the first update
            self.before = fixed_samples(trainer)

    def on_train_end(self, trainer: Trainer, run: Run) -> None:
        run.summary["samples"] = {"before": self.before, "after": fixed_samples(trainer)}


def fixed_samples(trainer: Trainer) -> dict[str, list[dict[str, Any]]]:
    """Samples responses to a few fixed queries, by agent name; each agent answers alone (solo).

    With several roles, the key `chain` holds responses in the roles of the first iteration, role by role.

    A solo agent reads the first role's prompt. If roles are fixed and have their own prompts, agents of later roles
    never train on that prompt, so they are not sampled solo.
    """
    config = trainer.config
    size = trainer.task.rows_per_query(config.branches)
    queries = min(NUM_QUERIES, len(trainer.task.dataset) // size)
    rows = [query * size + query % size for query in range(queries)]  # one row per query
    batch = Batch(trainer.task.dataset[rows], config.sampling.max_new_tokens)

    first_chain = trainer.chain(0)
    own_prompts = any(role.prompt is not None for role in config.roles)
    solo = trainer.agents
    if own_prompts and config.cory.exchange_period == 0:
        solo = list(first_chain.agents[:1])
    chains = {agent.name: Chain([agent], trainer.task, config.sampling) for agent in solo}
    if config.cory.num_roles > 1:
        chains["chain"] = first_chain

    samples = {}
    for name, chain in chains.items():
        # All ranks answer all of these queries, so the random numbers do not depend on the rank.
        num_roles = len(chain.agents)
        generators = role_generators(config.seed, Purpose.SAMPLES, num_roles)
        is_full_chain = num_roles == config.cory.num_roles  # only a full chain earns a team reward
        rollouts = chain.roll_out(batch, generators)
        scores = score_rollouts(trainer.task.reward, batch, rollouts)
        task_rewards = [role_scores.total for role_scores in scores]
        samples[name] = describe(
            chain.agents,
            batch.columns,
            rollouts,
            task_rewards,
            slice(None),
            trainer.task.columns_read(),
            score_team(trainer.task.team, batch, rollouts) if is_full_chain else None,
        )
    return samples


class Guards(Callback):
    """Explains each warning flag when it is first raised, and ends runs whose KL grows too large.

    A run ends when a role's KL to the reference exceeds `guards.stop_at_kl`, in nats per response.
    """

    def __init__(self) -> None:
        self.printed: set[str] = set()

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
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
    """Ends a run after `guards.patience` held-out evaluations without a better reward.

    The reward is the task reward, averaged over roles, plus any team reward. The agents with the best reward so far are
    kept in RUN/best, starting with the untrained ones.

    Args:
        held_out: the callback that measures the reward.

    Attributes:
        best: the best evaluation so far: `iterations` and rewards by name; empty before the first evaluation.
        waited: number of evaluations since the best one.
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

    def on_train_begin(self, trainer: Trainer, run: Run) -> None:
        if trainer.config.guards.patience is not None and self.held_out.before:
            self._keep(trainer)

    def _keep(self, trainer: Trainer) -> None:
        """Saves the agents and their latest rewards as the best."""
        self.best = {"iterations": trainer.state.iteration, **self.held_out.latest}
        self.waited = 0
        save_agents(trainer.run, trainer.agents, BEST, self.best)

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        patience = trainer.config.guards.patience
        if patience is None or "eval_task_reward" not in iteration.records[0]:
            return
        run = trainer.run
        largest = sum_of_rewards(self.best)
        if sum_of_rewards(self.held_out.latest) > largest:
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

    def on_train_end(self, trainer: Trainer, run: Run) -> None:
        # If the run was resumed only to end it, RUN/best may be of a later iteration than `self.best`.
        saved = run.folder / BEST / SUMMARY
        if run.writes and saved.exists():
            run.summary["best"] = json.loads(saved.read_text(encoding="utf-8"))


class Progress(Callback):
    """Shows each agent's role, reward (task plus team) and KL, and the latest held-out reward, averaged over roles.

    Args:
        held_out: the callback that measures the held-out reward.
    """

    bar: tqdm

    def __init__(self, held_out: HeldOut) -> None:
        self.held_out = held_out

    def on_train_begin(self, trainer: Trainer, run: Run) -> None:
        hidden = not (run.writes and sys.stderr.isatty())
        self.bar = tqdm(
            total=trainer.config.iterations,
            initial=len(run.seconds),
            bar_format=LAYOUT,
            disable=hidden,
            dynamic_ncols=True,
        )
        run.exits.callback(self.bar.close)

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        if not trainer.run.writes:
            return
        text = progress_line(iteration.records)
        if self.held_out.latest:
            # The first line shows the reward before training, to compare later rewards with.
            before = list(self.held_out.before.values()) if iteration.index == 0 else []
            rewards = held_out_rewards(before) if before else self.held_out.latest
            measured_at = 0 if before else self.held_out.measured_at
            text += f" | held out after {measured_at}: {sum_of_rewards(rewards):+.2f}"
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

    def on_train_end(self, trainer: Trainer, run: Run) -> None:
        self.bar.close()


def progress_line(records: Sequence[Mapping[str, Any]]) -> str:
    """Formats an iteration as one line: each agent's name, role, task plus team reward, and KL.

    With more than two roles, the line shows means over roles.
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
    """Saves and prints the results of a run.

    Frozen agents are saved at the beginning; trained agents, curves, summary and report at the end.
    """

    def on_train_begin(self, trainer: Trainer, run: Run) -> None:
        # A resumed run has already saved its frozen agents.
        if not run.resumed:
            save_agents(run, [agent for agent in trainer.agents if not agent.is_trained])

    def on_train_end(self, trainer: Trainer, run: Run) -> None:
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
        if process.caveats:
            summary["notes"] = [*process.caveats]
        # Deletes the old summary first, so that a run that crashes while saving does not look finished.
        if run.writes:
            (run.folder / SUMMARY).unlink(missing_ok=True)
        save_agents(run, [agent for agent in trainer.agents if agent.is_trained])
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
        write_report(run.folder, partial(run_page, method=trainer.config.method()))
        print(summary_table(means, roles))
        print(sample_table(**summary["samples"]))
        speed = f"{summary['seconds_per_iteration']:.2f} s per iteration"
        best = ""
        if "best" in summary:
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
    """Saves agents in the run's folder or a subfolder, replacing earlier ones. All processes must call this.

    A `summary` is saved with them, together with the run's settings, so that the subfolder can be read as a run.
    """
    # The main process writes; the others only help to gather sharded weights.
    with filled(run.folder) if run.writes else nullcontext(run.folder) as unfinished:
        for agent in agents:
            agent.save(unfinished / subfolder / agent.name)
        if summary is not None and run.writes:
            write_text(unfinished / subfolder / "config.yaml", yaml_text(run.record))
            write_text(unfinished / subfolder / SUMMARY, json.dumps(summary, indent=2))


def _draw_curves(run: Run, first_role: str, note: str) -> None:
    try:
        from cory.run.plots import plot_curves  # imported late, as matplotlib is slow to import

        plot_curves(run.history, run.folder / "curves.png", first_role, note)
    except Exception as error:
        warnings.warn(
            f"curves.png could not be drawn ({error}); everything else is saved", stacklevel=2
        )
