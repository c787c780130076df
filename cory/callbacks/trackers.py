"""wandb, TensorBoard or trackio beside the run's own files: `tracker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cory.callbacks.callback import Callback
from cory.iteration import Iteration
from cory.run.tracker import log_samples, start_tracker

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer


class Trackers(Callback):
    """Passes samples, metrics and timings of each iteration on to the tracker of the settings, in the main process."""

    def __init__(self) -> None:
        self.tracker: Any = None  # one of accelerate's

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        if not run.writes:
            return
        resumed_at = len(run.seconds) if run.resumed else None
        self.tracker = start_tracker(trainer.config, run.folder, resumed_at)
        if self.tracker is not None:
            run.exits.callback(self.tracker.finish)  # however the run ends

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        if self.tracker is None:
            return
        if iteration.samples:
            log_samples(self.tracker, iteration.index, iteration.samples)
        # An agent that holds several roles has a curve for each of them.
        several_roles = trainer.config.cory.roles > trainer.config.cory.num_agents
        self.tracker.log(curves(iteration.records, several_roles), step=iteration.index)
        timings = {f"time/{key}": value for key, value in iteration.timings.items() if key != "iteration"}
        self.tracker.log(timings, step=iteration.index)


def curves(records: list[dict[str, Any]], several_roles: bool) -> dict[str, float]:
    """The numbers of an iteration by the names of their curves: `agent_1/kl`, or `agent_1/pioneer/kl`."""
    values: dict[str, float] = {}
    for record in records:
        agent, role = record["agent"], record["role"]
        prefix = f"{agent}/{role}" if several_roles else agent
        values |= {f"{prefix}/{key}": value for key, value in record.items() if isinstance(value, float)}
        values[f"{agent}/is_{role}"] = 1
    return values
