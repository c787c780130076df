"""What a run leaves: agents with their model cards, curves.png and summary.json."""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory.callbacks.callback import Callback
from cory.errors import UserError, is_not_written
from cory.hub import model_card
from cory.parallel import distributed
from cory.report.summary import ended_early, summarise, summarise_roles
from cory.report.tables import sample_table, summary_table
from cory.run.clock import peak_memory_mb
from cory.run.record import BEST

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer


class Results(Callback):
    """Saves frozen agents at the beginning, the others, curves and summary at the end, and prints the results.

    Raises a UserError, in all processes, if something cannot be written, such as on a full disk. What was saved before
    stays as it was then: the new files appear when all of them are written.
    """

    collective = True  # of sharded agents each process has a part

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        frozen = [agent.name for agent in trainer.agents if not agent.is_trained]
        # A run that is continued has them already, and they do not change.
        missing = distributed.broadcast_object(
            [name for name in frozen if not (run.folder / name).is_dir()]
        )
        if missing:
            with _explained(run):
                self._save_frozen(trainer, run, missing)

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
        with _explained(run):
            self._save(trainer, run, summary)
        run.finished = True
        if run.writes:
            print(summary_table(means, roles))
            print(sample_table(**summary["samples"]))
            speed = f"{summary['seconds_per_iteration']:.2f} s per iteration"
            best = ""
            if summary["stopped"] and "best" in summary:
                best = f", the best agents in {run.folder / BEST}"
            print(
                f"\n{speed}. Curves, samples and agents are in {run.folder}{best}; report.html shows them"
            )

    def _save_frozen(self, trainer: CoryTrainer, run: Run, names: Sequence[str]) -> None:
        with run.staged() as folder:
            for agent in trainer.agents:
                if agent.name in names:
                    distributed.fail_together(partial(agent.save, folder / agent.name))
                    distributed.fail_together(
                        partial(_write_card, trainer, run, agent.name, folder)
                    )

    def _save(self, trainer: CoryTrainer, run: Run, summary: Mapping[str, Any]) -> None:
        # Each step is taken by all processes, so that none waits for one that could not write.
        # Of an extended run: without a summary, it is not taken for finished while only some agents are new.
        outdated = [run.folder / "summary.json"]
        with run.staged(outdated) as folder:
            for agent in trainer.trained_agents:
                distributed.fail_together(partial(agent.save, folder / agent.name))
            distributed.fail_together(partial(_write_results, trainer, run, summary, folder))


@contextmanager
def _explained(run: Run) -> Iterator[None]:
    """Turns what is raised where something cannot be written into a UserError."""
    try:
        yield
    except Exception as error:
        if not (is_not_written(error) or isinstance(error, distributed.FailedElsewhere)):
            raise
        raise UserError(
            f"expected to save agents and results in {str(run.folder)!r}, which could not be written ({error})"
        ) from None


def _write_card(
    trainer: CoryTrainer,
    run: Run,
    name: str,
    folder: Path,
) -> None:
    if run.writes:
        agent = folder / name
        card = model_card({name: agent}, trainer.config, run.fingerprint, len(run.seconds))
        (agent / "README.md").write_text(card, encoding="utf-8")


def _write_results(
    trainer: CoryTrainer, run: Run, summary: Mapping[str, Any], folder: Path
) -> None:
    if not run.writes:
        return
    for agent in trainer.trained_agents:
        _write_card(trainer, run, agent.name, folder)
    note = ended_early(summary, trainer.config.iterations)
    try:
        from cory.report.plots import plot_curves  # here, as importing matplotlib takes a while

        plot_curves(run.history, folder / "curves.png", trainer.task.prompts.name(0), note)
    except Exception as error:
        if is_not_written(error):
            raise
        # Of before the run was extended.
        (trainer.run.folder / "curves.png").unlink(missing_ok=True)
        warnings.warn(f"curves.png could not be drawn ({error}); all else is saved", stacklevel=2)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
