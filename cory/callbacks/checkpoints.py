"""When a run's state is saved, and which checkpoints stay. `cory/resume/checkpoint.py` has their format."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from cory.callbacks.callback import Callback
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
        self.saved_iteration = trainer.state.iteration

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        # The iteration is done: all that it writes to the run's files is written, and their lengths are saved.
        state = trainer.state
        save_every = trainer.config.checkpoint.save_every
        state.iteration = iteration.index + 1

        is_last = state.iteration == trainer.config.iterations
        is_due = save_every > 0 and state.iteration % save_every == 0
        if is_last or is_due or trainer.should_stop or trainer.failure is not None:
            self.save(trainer)

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

    def save(self, trainer: CoryTrainer) -> None:
        """Writes a checkpoint and then removes older ones. All processes must call this.

        A state that is saved already stays as it is. If a checkpoint cannot be written (disk full),
        warns and keeps all earlier ones.
        """
        run, state = trainer.run, trainer.state
        folder = run.folder / "checkpoints"
        if distributed.broadcast_object(distributed.is_main() and self._is_saved(trainer)):
            return
        try:
            state.lengths = distributed.fail_together(run.lengths)
            checkpoint.write(folder, state, trainer.trained_agents)
        except Exception as error:
            if not is_not_written(error):
                raise
            if run.writes:
                warnings.warn(
                    f"The checkpoint before iteration {state.iteration} could not be written to {folder} ({error}). "
                    "The run continues; earlier checkpoints are unchanged.",
                    stacklevel=2,
                )
            return
        self.saved_iteration = state.iteration
        if not run.writes:
            return
        for old in checkpoint.folders(folder)[trainer.config.checkpoint.keep :]:
            with suppress(OSError):
                remove(old)

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
