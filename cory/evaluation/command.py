"""The command of a task's evaluation: its settings, and the task that they make. Importing it does not import torch."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory.code_files import announce_files
from cory.command import Arguments, add_flags, as_config, flag_values, show_values
from cory.config import Config, ModelConfig, SamplingConfig, blocks, changed, from_data
from cory.errors import UserError
from cory.evaluation.agents import run_agents
from cory.evaluation.settings import EvaluationConfig
from cory.identity import is_local
from cory.run.settings import named, read_settings
from cory.task_kinds import TaskKind, kind_of_run

if TYPE_CHECKING:
    from cory.evaluation.evaluate import Evaluation

CHANGES = ("--task.", "--model.", "--sampling.")  # flags that change keys of these blocks


def evaluate_command(kind: TaskKind[Any] | None, doc: str | None) -> "Evaluation":
    """Evaluates the models on the command line.

    Args:
        kind: of the task. None: that of the first run.
        doc: the script's text, for `--help`.
    """
    settings = parse_settings(kind, doc)
    run = first_run(settings.models)
    if kind is None:
        kind = _kind_of(run, settings.models)
    settings.task = flag_values(blocks(kind.config)["task"], settings.task)
    config = task_config(kind, run, settings)
    if run is not None:
        announce_files(run, config, {f"task.{key}" for key in settings.task})
    task = kind.make_task(config, kind.held_out_rows(config, settings.split))

    # After all is checked: importing torch takes seconds.
    from cory.evaluation.evaluate import evaluate

    return evaluate(settings.models, task, settings)


def parse_settings(
    kind: TaskKind[Any] | None, description: str | None, argv: Sequence[str] | None = None
) -> EvaluationConfig:
    """The settings on the command line of an evaluation; those of `task` as texts, as the run's task is not known.

    `kind` is that of the script, None that of the command for all tasks. `argv` None: the command line of the process.
    """
    settings_class = (kind and kind.evaluation) or EvaluationConfig
    parser = Arguments(description)
    add_flags(parser, settings_class, without=["models"])
    show_values(parser, asdict(settings_class()))
    parser.add_argument(
        "models", nargs="+", help="Hub ids, local folders, or folders of runs (all their agents)"
    )
    words = sys.argv[1:] if argv is None else argv
    # --task.KEY, whose block is known once the run is.
    for flag in {word.partition("=")[0] for word in words}:
        if flag.startswith(CHANGES):
            parser.add_argument(flag, default=argparse.SUPPRESS)
    texts = vars(parser.parse_args(words))
    models = texts.pop("models")
    changes = {key: texts.pop(key) for key in list(texts) if "." in key}
    values = flag_values(settings_class, texts)
    for key, text in changes.items():
        block, _, name = key.partition(".")
        values.setdefault(block, {})[name] = text
    settings = from_data(settings_class, values)
    settings.models = [str(named(Path(name))) for name in models]
    settings.model = flag_values(ModelConfig, settings.model)
    settings.sampling = flag_values(SamplingConfig, settings.sampling)
    settings.check()
    return settings


def first_run(models: Sequence[str]) -> Path | None:
    """The first of the models that is the folder of a run. Raises a UserError if a folder does not exist."""
    for name in models:
        names_folder = is_local(name) or name.startswith("runs/")
        if names_folder and not Path(name).exists():
            raise UserError(
                f"models: expected folders of runs or models that exist, or Hub ids, got {name!r}"
            )
    return next((Path(name) for name in models if run_agents(Path(name))), None)


def _kind_of(run: Path | None, models: Sequence[str]) -> TaskKind[Any]:
    if run is None:
        raise UserError(
            f"models: expected the folder of at least one run, for its prompts, got {list(models)}"
        )
    kind = kind_of_run(read_settings(run))
    if kind is None:
        raise _made_in_python(run)
    return kind


def task_config(kind: TaskKind[Any], run: Path | None, settings: EvaluationConfig) -> Config:
    """The settings from which the evaluation's task is made: the run's, with what `settings.task`
    changes.

    Raises a UserError: the run is not of this task, or a key is unknown.
    """
    if run is None:
        config = kind.config()
        config.model.name = settings.base or settings.models[0]
    else:
        recorded = read_settings(run)
        run_kind = kind_of_run(recorded)
        if run_kind is None:
            raise _made_in_python(run)
        if run_kind.name != kind.name:
            raise UserError(
                f"{run}: expected a run of {kind.name}, got one of {run_kind.name}. Any run is evaluated by: "
                f"python -m cory.evaluation {shlex.quote(str(run))}"
            )
        config = as_config(kind.config, recorded, run / "config.yaml")
    config.seed = settings.seed
    config = config.on(settings.device)
    held_out = getattr(config.task, "eval_dataset", None)
    if held_out and "dataset" in settings.task and "eval_dataset" not in settings.task:
        raise UserError(
            f"task.dataset: expected task.eval_dataset, as the run's held-out prompts are {held_out!r}, got "
            f"{settings.task['dataset']!r}"
        )
    config.task = changed(config.task, settings.task)
    return config


def _made_in_python(run: Path) -> UserError:
    reward = (read_settings(run).get("fingerprint") or {}).get("reward", "one of your own")
    return UserError(
        f"{run}: expected a run of a registered task, got one that was made in Python (reward: {reward}). Evaluate it "
        f"in Python, with its held-out task: cory.evaluate([{str(run)!r}], task)"
    )
