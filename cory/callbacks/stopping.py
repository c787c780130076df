"""Whether a run ends before its time: the one decision per iteration that all processes take together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cory.callbacks.callback import Callback
from cory.iteration import Iteration
from cory.parallel import distributed
from cory.run.record import CALLBACK

if TYPE_CHECKING:
    from cory.trainer import CoryTrainer


class Stopping(Callback):
    """Makes `trainer.should_stop` and `trainer.signal` the same in all processes.

    The run stops if a callback has set `trainer.should_stop` in any of them, or if any has received
    a signal.
    """

    collective = True

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        requests = distributed.all_gather_object(
            (trainer.should_stop, trainer.signals.received or 0)
        )
        trainer.signal = max(received for _, received in requests) or None
        asked = any(should_stop for should_stop, _ in requests)
        trainer.should_stop = asked or trainer.signal is not None

        done, total = iteration.index + 1, trainer.config.iterations
        if done == total:
            trainer.state.stopped_by = None  # nothing was left to end
            return
        if not asked:
            return
        if trainer.state.stopped_by is None:
            trainer.state.stopped_by = CALLBACK
        if trainer.signal is None:
            trainer.run.say(f"The run ends here, after iteration {done} of {total}.")
