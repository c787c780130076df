"""What watches a run: the base class of callbacks, and what they see of the trainer."""

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
    """How far a run is.

    Args:
        iteration: the next one, from 0.
        stopped_by: the guard that has ended the run, such as `guards.patience`, or "a callback"; None: nothing has.
    """

    iteration: int = 0
    stopped_by: str | None = None


class Trainer(Protocol):
    """What callbacks see of `CoryTrainer`, which describes it."""

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
    """Code at fixed points of a run. Override what you need and pass it to `CoryTrainer(..., callbacks=[...])`.

    All methods are called in every process. `trainer` has the run's `config`, `agents`, `task`,
    `schedule` and, while it trains, `run`. `trainer.should_stop = True`, in any process, saves the
    state and ends the run after the current iteration.

    An error that a method raises ends the run, with its traceback, the newest checkpoint and the command that continues
    from there.
    """

    def on_train_begin(self, trainer: Trainer, run: Run) -> None:
        """Before the first iteration, also of a resumed run. `run.folder` is the run's folder."""

    def on_iteration_begin(self, trainer: Trainer, k: int) -> None:
        """Before iteration `k`, from 0. `trainer.schedule.order(k)` says which agent has which role."""

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        """After an iteration, before its lines are written: what is added to one of `iteration.records`, a record per
        role (docs/metrics.md), stands in metrics.jsonl.
        """

    def on_train_end(self, trainer: Trainer, run: Run) -> None:
        """After the last iteration, when agents, summary and report are saved; not after a failure or a signal."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint saves of the callback: values that JSON has."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned, when a run continues; called before `on_train_begin`."""


def load_callbacks(names: list[str] | str) -> list[Callback]:
    """An object of each class that settings name: `callbacks: FILE.py:NAME`.

    Raises a UserError: a file is missing or fails, or it defines no such class, or one that is no
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
