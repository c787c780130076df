"""Task kinds: a registry of the functions that make a run's task from its settings.

A package defines a task kind, and registers it as an entry point in its pyproject.toml:

    [project.entry-points."cory.tasks"]
    imdb = "imdb_train.config:IMDB"

A run records its kind's name, and commands such as evaluation look up this name among the registered kinds. Code that
is not registered is never imported. Importing this module does not import torch.
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

GROUP = "cory.tasks"  # group of entry points
BUILT_IN = EntryPoint("own", "cory.own_task:OWN", GROUP)
C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class TaskKind(Generic[C]):
    """A kind of task.

    Args:
        name: the registered name, also recorded in a run's config.yaml (`fingerprint.task`).
        config: class of a run's settings.
        module: module that defines the functions `make_task`, `training_rows` and `held_out_rows`. It is imported on
            the first call, since it may import torch.
        evaluation: class of an evaluation's settings. None: `EvaluationConfig`.
    """

    name: str
    config: type[C]
    module: str
    evaluation: type[EvaluationConfig] | None = None

    def make_task(self, config: C, rows: "Dataset | None" = None) -> "Task":
        """Returns a run's task with the run's roles. Its dataset is `rows`, or else the training rows.

        Raises a UserError if the settings are invalid, or `config.resume` names a run made in Python.
        """
        run = config.resume
        if run not in (None, "auto") and kind_of_run(read_settings(Path(run))) is None:
            raise UserError(
                f"resume: expected a run of cory.train or of a task's script, got {run}, which was made in Python. "
                f"Continue it in Python: config.resume = {run!r}"
            )
        task: Task = self._functions().make_task(config, rows)
        task.kind = self.name
        return task.with_roles(config.roles)

    def training_rows(self, config: C) -> "Dataset":
        """Returns a run's training rows, with a column `prompt`. Raises a UserError."""
        return self._functions().training_rows(config)

    def held_out_rows(self, config: C, split: str | None = None) -> "Dataset":
        """Returns held-out rows from `split` (None: the default one). Raises a UserError if training used them."""
        return self._functions().held_out_rows(config, split)

    def _functions(self) -> Any:
        return importlib.import_module(self.module)


def find_kind(name: str) -> TaskKind[Any]:
    """Returns the kind registered under a name. Raises a UserError if there is none."""
    registered = _registered()
    if name not in registered:
        raise UserError(
            f"expected a task among {', '.join(sorted(registered))}, got {name!r}. Install the package that registers "
            f"this task as an entry point of {GROUP!r}"
        )
    return registered[name].load()


def kind_of_script(script: str) -> TaskKind[Any]:
    """Returns the kind registered by the package that holds a script, such as imdb_train/cory.py.

    Raises a UserError if the package has registered no kind.
    """
    package = Path(script).parent.name
    for name, entry_point in _registered().items():
        if entry_point.module.split(".")[0] == package:
            return find_kind(name)
    raise UserError(f"script: expected one in the folder of a registered task, got {script!r}")


def kind_of_run(settings: Mapping[str, Any]) -> TaskKind[Any] | None:
    """Returns the kind of a run's task, given the run's settings; None if the task was made in Python.

    Raises a UserError if the kind is not registered.
    """
    name = (settings.get("fingerprint") or {}).get("task")
    return find_kind(name) if name else None


def run_config(run: Path) -> Config:
    """Returns a run's settings, in the class of its task's kind. A task made in Python has no `task` block.

    Raises a UserError if the folder does not hold a run, or its settings do not fit the task.
    """
    settings = read_settings(run)
    kind = kind_of_run(settings)
    if kind is None:
        settings.pop("task", None)
    return as_config(kind.config if kind else Config, settings, run / "config.yaml")


def _registered() -> dict[str, EntryPoint]:
    """Returns the entry points of installed packages by name, with the built-in kind."""
    return {point.name: point for point in entry_points(group=GROUP)} | {BUILT_IN.name: BUILT_IN}
