"""When a run's state is saved, and which checkpoints stay. `cory/resume/checkpoint.py` has their format."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from cory.callbacks.callback import Callback
from cory.config import HELD_OUT_REWARDS
from cory.errors import is_not_written
from cory.iteration import Iteration
from cory.parallel import distributed
from cory.resume import checkpoint
from cory.run.output import remove

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer


class Checkpoints(Callback):
    """Saves the run's state when it is due (`checkpoint.save_every`), when the run stops, and after a failure."""

    collective = True  # of sharded agents each process writes its part
    saved_iteration: int  # whose checkpoint, if there is one, holds the state of this run

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        state = trainer.state
        self.saved_iteration = state.iteration
        if state.best is None:
            return
        # Values of another metric or reward do not compare, and a checkpoint may have been removed since.
        is_of_metric = all(state.best.get(key) == value for key, value in _metric(trainer).items())
        path = checkpoint.path_of(run.folder / "checkpoints", state.best["iteration"])
        if not distributed.broadcast_object(is_of_metric and path.exists()):
            state.best = None

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        # The iteration is done: all that it writes to the run's files is written, and their lengths are saved.
        state = trainer.state
        settings = trainer.config.checkpoint
        # A held-out reward is of the agents as this iteration leaves them, other metrics as it found them.
        if settings.best not in (None, *HELD_OUT_REWARDS) and self._is_on_disk(trainer):
            _compare(trainer, iteration)
        state.iteration = iteration.index + 1

        is_last = state.iteration == trainer.config.iterations
        is_due = (
            trainer.should_stop
            or trainer.failure is not None
            or (is_last and settings.save_final)
            or (settings.save_every > 0 and state.iteration % settings.save_every == 0)
        )
        if not is_due:
            return
        best_before = state.best
        if settings.best in HELD_OUT_REWARDS:
            _compare(trainer, iteration)
        if not self.save(trainer):
            # A checkpoint that could not be written must not cost that one.
            state.best = best_before

    @contextmanager
    def saved_on_error(self, trainer: CoryTrainer) -> Iterator[None]:
        """Saves the state before an iteration if that iteration, the body, fails before an agent
        has changed.

        Saving takes all processes, so the error must have been raised in all of them
        (`cory/parallel/distributed.py`).
        """
        steps_before = [agent.optimizer_steps for agent in trainer.agents]
        try:
            yield
        except Exception as error:
            if distributed.raised_everywhere(error):
                changed = steps_before != [agent.optimizer_steps for agent in trainer.agents]
                if not distributed.all_reduce_max(changed):
                    self.save(trainer)
            raise

    def save(self, trainer: CoryTrainer) -> bool:
        """Writes a checkpoint and then removes older ones; whether the state is saved. All processes must call this.

        A state that is saved already stays as it is. If a checkpoint cannot be written (disk full),
        warns and keeps all earlier ones.
        """
        run, state = trainer.run, trainer.state
        folder = run.folder / "checkpoints"
        if distributed.broadcast_object(distributed.is_main() and self._is_saved(trainer)):
            return True
        try:
            state.lengths = distributed.fail_together(run.lengths)
            target = checkpoint.write(folder, state, trainer.trained_agents)
        except Exception as error:
            if not is_not_written(error):
                raise
            if run.writes:
                warnings.warn(
                    f"The checkpoint before iteration {state.iteration} could not be written to {folder} ({error}). "
                    "The run continues; earlier checkpoints are unchanged.",
                    stacklevel=2,
                )
            return False
        self.saved_iteration = state.iteration
        if not run.writes:
            return True
        kept = [target]
        if state.best is not None:
            kept.append(checkpoint.path_of(folder, state.best["iteration"]))
        for old in checkpoint.folders(folder)[trainer.config.checkpoint.keep :]:
            if old not in kept:
                with suppress(OSError):
                    remove(old)
        return True

    def _is_on_disk(self, trainer: CoryTrainer) -> bool:
        """Whether there is a checkpoint of the state before this iteration."""
        state = trainer.state
        path = checkpoint.path_of(trainer.run.folder / "checkpoints", state.iteration)
        return distributed.broadcast_object(
            self.saved_iteration == state.iteration and path.exists()
        )

    def _is_saved(self, trainer: CoryTrainer) -> bool:
        """Whether a valid checkpoint holds the state, so that writing it again would only put that one at risk."""
        if self.saved_iteration != trainer.state.iteration:
            return False
        path = checkpoint.path_of(trainer.run.folder / "checkpoints", self.saved_iteration)
        try:
            checkpoint.read(path, [agent.name for agent in trainer.trained_agents])
        except checkpoint.Damaged:
            return False
        return True


def _metric(trainer: CoryTrainer) -> dict[str, Any]:
    """What the values of `checkpoint.best` are of: its name and, of a held-out reward, the queries."""
    name = trainer.config.checkpoint.best
    if name not in HELD_OUT_REWARDS:
        return {"metric": name}
    return {
        "metric": name,
        "held_out_sha256": trainer.state.config["fingerprint"]["held_out_sha256"],
    }


def _compare(trainer: CoryTrainer, iteration: Iteration) -> None:
    """Makes the state before `state.iteration` the best one if this iteration's metric is better than earlier ones."""
    state, name = trainer.state, trainer.config.checkpoint.best
    # Not every role's record has every metric: one of the task may not apply to its responses, and a frozen agent has
    # none of an update.
    values = [record[name] for record in iteration.records if name in record]
    if values and _is_better(statistics.fmean(values), state.best):
        state.best = {
            **_metric(trainer),
            "value": statistics.fmean(values),
            "iteration": state.iteration,
        }


def _measured_in(best: Mapping[str, Any]) -> int:
    """The iteration whose metric made a checkpoint the best."""
    return best["iteration"] - (best["metric"] in HELD_OUT_REWARDS)


def _is_better(value: float, best: Mapping[str, Any] | None) -> bool:
    """Whether a metric's value makes its checkpoint the best so far.

    A value that is not finite (all updates of an iteration were skipped) is never the best.
    """
    return math.isfinite(value) and (best is None or value > best["value"])
