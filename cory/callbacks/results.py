"""What a run leaves: agents with their model cards, curves.png and summary.json."""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from cory.agent import Agent
from cory.callbacks.callback import Callback
from cory.hub import model_card
from cory.report.summary import ended_early, summarise, summarise_roles
from cory.report.tables import sample_table, summary_table
from cory.run.clock import peak_memory_mb
from cory.run.folder import BEST, SUMMARY, filled, write_text

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer


class Results(Callback):
    """Saves frozen agents at the beginning, the others, curves and summary at the end, and prints the results."""

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        # A run that is continued has them already, and they do not change.
        if not run.resumed:
            self._save(trainer, run, [agent for agent in trainer.agents if not agent.is_trained])

    def on_train_end(self, trainer: CoryTrainer, run: Run) -> None:
        means = summarise(run.history, [agent.name for agent in trainer.agents])
        roles = summarise_roles(run.history)
        stopped = len(run.seconds) < trainer.config.iterations  # by a callback, such as StopAtKL
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
        self._save(trainer, run, trainer.trained_agents)
        if not run.writes:
            return

        note = ended_early(summary, trainer.config.iterations)
        _draw_curves(run, trainer.task.prompts.name(0), note)
        write_text(run.folder / SUMMARY, json.dumps(summary, indent=2))
        print(summary_table(means, roles))
        print(sample_table(**summary["samples"]))
        speed = f"{summary['seconds_per_iteration']:.2f} s per iteration"
        best = ""
        if summary["stopped"] and "best" in summary:
            best = f", the best agents in {run.folder / BEST}"
        print(
            f"\n{speed}. Curves, samples and agents are in {run.folder}{best}; report.html shows them"
        )

    def _save(self, trainer: CoryTrainer, run: Run, agents: Sequence[Agent]) -> None:
        """Saves agents with their model cards."""
        save_agents(run, agents)
        if run.writes:
            for agent in agents:
                folder = run.folder / agent.name
                card = model_card(
                    {agent.name: folder},
                    trainer.config,
                    run.record["fingerprint"],
                    len(run.seconds),
                )
                write_text(folder / "README.md", card)


def save_agents(run: Run, agents: Sequence[Agent], subfolder: str = "") -> None:
    """Saves agents in the run's folder, or one in it, in the place of those before. All processes must call this."""
    # The others only help to put sharded agents together.
    with filled(run.folder) if run.writes else nullcontext(run.folder) as unfinished:
        for agent in agents:
            agent.save(unfinished / subfolder / agent.name)


def _draw_curves(run: Run, first_role: str, note: str) -> None:
    try:
        from cory.report.plots import plot_curves  # here, as importing matplotlib takes a while

        plot_curves(run.history, run.folder / "curves.png", first_role, note)
    except Exception as error:
        warnings.warn(f"curves.png could not be drawn ({error}); all else is saved", stacklevel=2)
