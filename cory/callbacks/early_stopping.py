"""Early stopping on the held-out reward, and the best agents: `guards.patience`."""

from __future__ import annotations

import json
import shutil
import statistics
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory.callbacks.callback import Callback
from cory.config import HELD_OUT_REWARDS
from cory.errors import UserError, is_not_written
from cory.iteration import Iteration
from cory.parallel import distributed
from cory.plural import counted
from cory.run.record import BEST, best_folder, best_of, finished_iterations, rewards_of_best

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer


class EarlyStopping(Callback):
    """Ends a run after `guards.patience` held-out evaluations without a better reward: the task reward, mean over the
    roles, plus the team reward, if there is one.

    Whenever that reward is the best so far, the agents are saved in RUN/RUN-best, a folder that is evaluated, chatted
    with and loaded like that of a run. What was reached before an interruption is read from the run's history.

    Attributes:
        best: the largest reward so far; None before the first evaluation.
        waited: evaluations since then.
    """

    collective = True  # of sharded agents each process has a part

    def __init__(self) -> None:
        self.best: float | None = None
        self.waited = 0

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        self.best = None
        self.waited = 0
        patience = trainer.config.guards.patience
        if patience is None:
            return
        distributed.fail_together(partial(_check_place, run))
        folder = best_folder(run.folder)
        saved = distributed.broadcast_object(
            (finished_iterations(folder) or 0, sum(rewards_of_best(folder).values()))
        )
        for index, rewards in held_out_rewards(run.history).items():
            if self.waited >= patience:  # the run was continued past that
                self.waited = 0
            if not self._is_better(rewards):
                self.waited += 1
            # Better agents that were not saved, as the disk was full or there was no guards.patience at the time, are
            # not the best.
            elif _was_saved((index + 1, sum(rewards.values())), saved):
                self._keep(rewards, index, run)
        # A run that patience had ended, and that is continued all the same, waits anew. So does one without any best.
        if self.waited >= patience or self.best is None:
            self.waited = 0

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        patience = trainer.config.guards.patience
        if patience is None or not iteration.eval_task_rewards:
            return
        rewards = held_out_rewards(iteration.records)[iteration.index]
        if self._is_better(rewards):
            if save_best(trainer, _best(rewards, iteration.index)):
                self._keep(rewards, iteration.index, trainer.run)
            return
        self.waited += 1
        if self.waited >= patience:
            waited = counted(patience, "evaluation")
            trainer.run.say(
                f"The held-out reward has not risen above {self.best:.3f} in {waited} (guards.patience). "
                f"The best agents are in {best_folder(trainer.run.folder)}."
            )
            trainer.state.stopped_by = "guards.patience"
            trainer.should_stop = True

    def _is_better(self, rewards: Mapping[str, float]) -> bool:
        return self.best is None or sum(rewards.values()) > self.best

    def _keep(self, rewards: Mapping[str, float], index: int, run: Run) -> None:
        """Makes the evaluation of an iteration, whose agents are saved, the best so far; summary.json then names it."""
        self.best = sum(rewards.values())
        self.waited = 0
        run.summary["best"] = _best(rewards, index)


def _best(rewards: Mapping[str, float], index: int) -> dict[str, Any]:
    """What identifies the best agents: how many iterations they were trained for, and their rewards."""
    return {"iterations": index + 1, **rewards}


def _was_saved(reached: tuple[int, float], saved: tuple[int, float]) -> bool:
    """Whether agents were saved as the best, by iterations and reward; `saved`: of those in the folder.

    What was saved before those is worse. Of a run that was killed, they may be of an iteration to come.
    """
    earlier, lower = (one < other for one, other in zip(reached, saved, strict=True))
    return reached == saved or (earlier and lower)


def _check_place(run: Run) -> None:
    """Raises a UserError if something else is where the best agents go."""
    folder = best_folder(run.folder)
    if run.writes and folder.exists() and best_of(folder) is None:
        raise UserError(
            f"guards.patience: expected a place for the best agents, got {str(folder)!r}, which holds something else; "
            "move it away"
        )


def held_out_rewards(records: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """By iteration, of those that have any, the held-out rewards by name: means over the roles."""
    by_iteration: dict[int, dict[str, list[float]]] = {}
    for record in records:
        for name in HELD_OUT_REWARDS:
            if name in record:
                rewards = by_iteration.setdefault(record["iteration"], {})
                rewards.setdefault(name, []).append(record[name])
    return {
        index: {name: statistics.fmean(values) for name, values in rewards.items()}
        for index, rewards in by_iteration.items()
    }


def save_best(trainer: CoryTrainer, summary: Mapping[str, Any]) -> bool:
    """Saves the agents as those of a run that has ended, all of them or none; whether they are saved. All processes
    must call this.

    If they cannot be written (disk full), warns and leaves those that were saved before.
    """
    run = trainer.run
    try:
        with run.staged() as folder:
            best = folder / best_folder(run.folder).name
            distributed.fail_together(partial(_begin, run, summary, best))
            for agent in trainer.agents:
                distributed.fail_together(partial(agent.save, best / agent.name))
    except Exception as error:
        if not is_not_written(error):
            raise
        if run.writes:
            warnings.warn(
                f"The best agents, those after {counted(summary['iterations'], 'iteration')}, could not be written to "
                f"{best_folder(run.folder)} ({error}). The run continues; earlier ones are unchanged.",
                stacklevel=2,
            )
        return False
    return True


def _begin(run: Run, summary: Mapping[str, Any], folder: Path) -> None:
    """In the main process: makes the folder, one of a run by its settings and its summary."""
    if not run.writes:
        return
    folder.mkdir()
    shutil.copy(run.folder / "config.yaml", folder)
    content = {BEST: folder.name, **summary}
    (folder / "summary.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
