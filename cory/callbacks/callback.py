"""The base class of callbacks: code at fixed points of a run, as in transformers' Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cory.iteration import Iteration
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer


class Callback:
    """Override what you need and pass it to `CoryTrainer(..., callbacks=[...])`.

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

    def on_update_begin(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        """When the responses of an iteration are scored, before the agents learn from them."""

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        """After an iteration. `iteration.records` holds its metrics (docs/metrics.md), a record per role."""

    def on_train_end(self, trainer: CoryTrainer, run: Run) -> None:
        """After the last iteration, when agents, summary and report are saved; not after a failure or a signal."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint saves of the callback: values that JSON has."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned, when a run continues; called before `on_train_begin`."""
