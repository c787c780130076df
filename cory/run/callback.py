"""The base class of callbacks, and the part of the trainer that they see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from datasets import Dataset

from cory.agent import Agent
from cory.chain import Chain, RoleSchedule
from cory.code_files import as_list, load_code
from cory.config import Config
from cory.errors import UserError
from cory.iteration import Iteration
from cory.run.folder import Run
from cory.task import Task


@dataclass
class RunState:
    """Progress of a run.

    Args:
        iteration: the next iteration, from 0.
        stopped_by: the guard that has ended the run, such as `guards.patience`, or "a callback"; None if nothing has.
    """

    iteration: int = 0
    stopped_by: str | None = None


class Trainer(Protocol):
    """The interface of `CoryTrainer` that callbacks see; see there for its attributes."""

    config: Config
    agents: list[Agent]
    task: Task
    eval_dataset: Dataset | None
    schedule: RoleSchedule
    run: Run
    state: RunState
    should_stop: bool

    def chain(self, k: int) -> Chain:
        """Returns the chain of iteration `k`."""


class Callback:
    """Runs code at fixed points of a run.

    Override the methods you need and pass an instance to `CoryTrainer(..., callbacks=[...])`. All methods are called in
    every process. `trainer` has the run's `config`, `agents`, `task`, `schedule` and, while it trains, `run`. Setting
    `trainer.should_stop = True` in any process saves the state and ends the run after the current iteration.

    An error raised by a method ends the run. Its message names the newest checkpoint and the command that continues
    from there.
    """

    def on_train_begin(self, trainer: Trainer, run: Run) -> None:
        """Called before the first iteration, also when a run is resumed. `run.folder` is the run's folder."""

    def on_iteration_begin(self, trainer: Trainer, k: int) -> None:
        """Called before iteration `k`, from 0. `trainer.schedule.order(k)` says which agent has which role."""

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        """Called after an iteration, before its lines are written.

        `iteration.records` holds one record per role (docs/metrics.md); keys added to a record go to metrics.jsonl.
        """

    def on_train_end(self, trainer: Trainer, run: Run) -> None:
        """Called after the last iteration, when agents, summary and report are saved; not after a failure or signal."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the callback's state for a checkpoint, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned when a run continues; called before `on_train_begin`."""


def load_callbacks(names: list[str] | str) -> list[Callback]:
    """Makes an object of each class that the settings name: `callbacks: FILE.py:NAME`.

    Raises a UserError: a file is missing or fails, or it defines no such class, or the class is not a
    callback.
    """
    callbacks = []
    for name in as_list(names):
        kind = load_code("callbacks", name).value
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise UserError(
                f"callbacks: expected a class derived from cory.Callback, got {name} = {kind!r}"
            )
        callbacks.append(kind())
    return callbacks
