"""Kinds of tasks: how a run's task is made from its settings, and which kinds there are.

A package of a task describes its kind once, beside its settings, and registers it as an entry point
of its pyproject.toml, under which the commands find it that start from the folder of a run:

    [project.entry-points."cory.tasks"]
    imdb = "imdb_train.config:IMDB"

Only what is registered is imported; the name in a run's folder is only looked up. Nothing here
imports torch.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cory.config import Config, EvaluationConfig
from cory.errors import UserError
from cory.run.settings import read_settings
from cory.settings import as_config

if TYPE_CHECKING:
    from datasets import Dataset

    from cory.task import Task

GROUP = "cory.tasks"  # of the entry points
BUILT_IN = EntryPoint("own", "cory.own_task:OWN", GROUP)
C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class TaskKind(Generic[C]):
    """A kind of task.

    Args:
        name: by which it is registered, and by which a run's config.yaml names it
            (`fingerprint.task`).
        config: class of a run's settings.
        module: with the three functions below. It is imported when the first of them is called, as
            it may import torch.
        evaluation: class of the settings of its evaluation; None: that of every task.
    """

    name: str
    config: type[C]
    module: str
    evaluation: type[EvaluationConfig] | None = None

    def make_task(self, config: C, rows: "Dataset | None" = None) -> "Task":
        """The task of a run, on `rows` or on those of training, with the run's roles. Raises a UserError."""
        run = config.resume
        if run not in (None, "auto") and kind_of_run(read_settings(Path(run))) is None:
            raise UserError(
                f"resume: expected a run of cory.train or of a task's script, got {run}, which was made in Python. "
                f"Continue it there: config.resume = {run!r}"
            )
        task: Task = self._functions().make_task(config, rows)
        task.kind = self.name
        return task.with_roles(config.roles)

    def training_rows(self, config: C) -> "Dataset":
        """The rows that a run is trained on, with a column `prompt`. Raises a UserError."""
        return self._functions().training_rows(config)

    def held_out_rows(self, config: C, split: str | None = None) -> "Dataset":
        """Held-out rows: of a split, or where it is None, the usual ones; a UserError if these are trained on."""
        return self._functions().held_out_rows(config, split)

    def _functions(self) -> Any:
        return importlib.import_module(self.module)


def find_kind(name: str) -> TaskKind[Any]:
    """The kind that is registered by a name. Raises a UserError if none is."""
    registered = _registered()
    if name not in registered:
        raise UserError(
            f"expected a task among {', '.join(sorted(registered))}, got {name!r}. Install the package that registers "
            f"it among its entry points {GROUP!r}"
        )
    return registered[name].load()


def kind_of_script(script: str) -> TaskKind[Any]:
    """The kind of a script beside its task's module: imdb_train/cory.py, ... Raises a UserError if there is none."""
    package = Path(script).parent.name
    for name, entry_point in _registered().items():
        if entry_point.module.split(".")[0] == package:
            return find_kind(name)
    raise UserError(f"script: expected one in the folder of a registered task, got {script!r}")


def kind_of_run(settings: Mapping[str, Any]) -> TaskKind[Any] | None:
    """The kind of a run's task, from its config.yaml; None if it was made in Python.

    Raises a UserError if it is of a kind that is not registered.
    """
    name = (settings.get("fingerprint") or {}).get("task")
    return find_kind(name) if name else None


def run_config(run: Path) -> Config:
    """A run's settings, in the class of its task. Those of a task that was made in Python have no
    `task` block.

    Raises a UserError: the folder is no run, or its settings are not those of its task.
    """
    settings = read_settings(run)
    kind = kind_of_run(settings)
    if kind is None:
        settings.pop("task", None)
    return as_config(kind.config if kind else Config, settings, run / "config.yaml")


def _registered() -> dict[str, EntryPoint]:
    """The entry points of installed packages by name, and the kind that needs none."""
    return {point.name: point for point in entry_points(group=GROUP)} | {BUILT_IN.name: BUILT_IN}
