"""The base class of callbacks, and the part of the trainer that they see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

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
        stopped_by: the setting in `guards` that ended the run early, such as `guards.patience`, or "a callback"; None
            otherwise.
    """

    iteration: int = 0
    stopped_by: str | None = None


class Trainer(Protocol):
    """The part of `CoryTrainer` that callbacks see. Its attributes are described in `CoryTrainer`."""

    config: Config
    agents: list[Agent]
    task: Task
    eval_dataset: Dataset | None
    schedule: RoleSchedule
    run: Run
    state: RunState
    should_stop: bool

    def chain(self, k: int) -> Chain:
        """Returns the chain of iteration `k`: the agents in the order in which they answer."""


class Callback:
    """Runs code at fixed points of a run.

    Override the methods you need and pass an instance to `CoryTrainer(..., callbacks=[...])`. All methods are called in
    every process. `trainer` has the run's `config`, `agents`, `task`, `schedule` and, while it trains, `run`. Setting
    `trainer.should_stop = True` in any process saves the state and ends the run after the current iteration.

    An error raised by a method ends the run. Its message names the newest checkpoint and the command that continues
    from there.
    """

    def on_train_begin(self, trainer: Trainer, run: Run) -> None:
        """Called before training starts or resumes. `run.folder` is the run's folder."""

    def on_iteration_begin(self, trainer: Trainer, k: int) -> None:
        """Called before iteration `k`, from 0. `trainer.schedule.order(k)` says which agent has which role."""

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        """Called after an iteration, before its records are written to metrics.jsonl.

        `iteration.records` holds one record per role (docs/metrics.md). Keys added to a record are written, too.
        """

    def on_train_end(self, trainer: Trainer, run: Run) -> None:
        """Called after agents, summary and report have been saved; not after a failure or a signal."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the callback's state for a checkpoint, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned. Called before `on_train_begin` when a run continues."""


def load_callbacks(names: list[str] | str) -> list[Callback]:
    """Creates an instance of each class that the settings name as `callbacks: FILE.py:NAME`.

    Raises a UserError if a file is missing or raises an error, or if NAME is not a callback class in it.
    """
    callbacks = []
    for name in as_list(names):
        callback_class = cast(type, load_code("callbacks", name).value)
        if not issubclass(callback_class, Callback):
            raise UserError(
                f"callbacks: expected a class derived from cory.Callback, got {name} = {callback_class!r}"
            )
        callbacks.append(callback_class())
    return callbacks
