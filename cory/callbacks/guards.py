"""Signs of trouble: flags are printed once, and a KL that is too large ends the run.

Numbers that are not finite are the learner's affair (`cory/learners/learner.py`), early stopping is
that of `early_stopping.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cory.callbacks.callback import Callback
from cory.iteration import Iteration
from cory.run.flags import MEANING

if TYPE_CHECKING:
    from cory.trainer import CoryTrainer


class Flags(Callback):
    """Prints what a flag in metrics.jsonl means when it is raised for the first time."""

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


class StopAtKL(Callback):
    """Ends the run when a role's KL to the reference exceeds `guards.stop_at_kl`, in nats per response."""

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        bound = trainer.config.guards.stop_at_kl
        if bound is None:
            return
        if any(record["kl"] > bound for record in iteration.records):
            trainer.run.say(f"KL is above guards.stop_at_kl = {bound:g}.")
            trainer.state.stopped_by = "guards.stop_at_kl"
            trainer.should_stop = True
