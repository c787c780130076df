"""The command of a task's evaluation: its settings, and the task that they make. Importing it does not import torch."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cory.cli.arguments import Arguments
from cory.cli.settings import as_config, read_settings
from cory.config import Config, changed
from cory.errors import UserError, expect
from cory.evaluation.settings import EvaluationConfig, run_agents
from cory.run.identity import is_local
from cory.tasks.config import OwnConfig
from cory.tasks.kinds import kind_of

if TYPE_CHECKING:
    from cory.evaluation.evaluator import Evaluation

C = TypeVar("C", bound=Config)
E = TypeVar("E", bound=EvaluationConfig)


def run(doc: str | None, settings_kind: type[E], kind: type[C], task_module: str, name: str) -> "Evaluation":
    """Evaluates the models on the command line.

    Args:
        doc: the script's text. kind: the configuration class of the task's runs. name: of a new folder of results.
        task_module: whose `make_task` makes the task, and `training_rows` what a run was trained on; it is imported
            late, as it imports torch.
    """
    settings = evaluation_settings(settings_kind, doc)
    config = task_config(kind, settings)
    from cory.evaluation.evaluator import evaluate  # after the settings are checked: importing torch takes seconds
    from cory.models.load import choose_device

    module = importlib.import_module(task_module)
    task = module.make_task(config, choose_device(settings.device), settings.split)
    return evaluate(settings.models, task, settings, kind, name, module.training_rows)


def evaluation_settings(kind: type[E], description: str | None) -> E:
    """The settings on the command line of a task's evaluation."""
    parser = Arguments(description)
    parser.add_argument("models", nargs="+", help="Hub ids, local folders, or folders of runs (all their agents)")
    parser.add_class_arguments(kind, skip={"models"})
    settings = kind(**vars(parser.of()))
    settings.check()
    return settings


def task_config(kind: type[C], settings: EvaluationConfig) -> C:
    """The settings from which the evaluation's task is made: the first run's, with what `settings.task` changes.

    Raises:
        UserError: the first run is not of this task, or a key is unknown.
    """
    for name in settings.models:
        local = is_local(name) or name.startswith("runs/")
        expect(not local or Path(name).exists(), "models", "folders of runs or models that exist, or Hub ids", name)
    run = next((Path(name) for name in settings.models if run_agents(Path(name))), None)
    if run is None:
        expect(kind is not OwnConfig, "models", "the folder of at least one run, for its prompts", settings.models)
        config = kind()
        config.model.name = settings.base or settings.models[0]
    else:
        made_of = read_settings(run)
        if "task" not in made_of:
            reward = (made_of.get("fingerprint") or {}).get("reward", "one of your own")
            raise UserError(
                f"{run}: expected a run of {_package(kind)}, got one of another task (reward: {reward}). "
                f"Evaluate it in Python, with its held-out task: cory.evaluate([{str(run)!r}], task)"
            )
        trained_kind, _ = kind_of(made_of)
        if trained_kind not in (kind, Config):
            raise UserError(
                f"{run}: expected a run of {_package(kind)}, got one of {_package(trained_kind)}. "
                f"To evaluate it: {_command(trained_kind)} {run}"
            )
        config = as_config(kind, made_of, run / "config.yaml")
    config.seed, config.task = settings.seed, changed(config.task, settings.task)  # type: ignore[attr-defined]
    return config


def _package(kind: type[Config]) -> str:
    """The package of a task, which has its scripts."""
    return "cory.train" if kind is OwnConfig else kind.__module__.removesuffix(".config")


def _command(kind: type[Config]) -> str:
    """How the runs of a task are evaluated."""
    return "python -m cory.evaluation" if kind is OwnConfig else f"python {_package(kind)}/evaluate.py"
