"""An experiment's file: what it may say, and how it is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from cory.cli.arguments import Verbatim
from cory.cli.messages import YAML, explained, similar_file
from cory.cli.yaml_file import read_yaml
from cory.config import nearest
from cory.errors import UserError


@dataclass
class Runs:
    """Runs that differ in their seed, and in the experiment's `over`, alone.

    Args:
        script: What trains: imdb_train/cory.py, ..., or cory.train for a task of your own.
        from_: `from` in the file: an experiment that has a group of this name, whose rows are taken.
        flags: Keys that are changed in the configuration.
        at: Further changes by scale; `config` names another configuration. If given, only the scales named here have
            these runs.
    """

    script: str
    from_: str | None = None
    flags: dict[str, Verbatim] = field(default_factory=dict)
    at: dict[str, dict[str, Verbatim]] = field(default_factory=dict)


@dataclass
class Scale:
    """A size at which the experiment runs.

    Args:
        config: Configuration, read by all scripts of the task.
        seeds: A run for each.
        minutes: What a run of `config` takes, by method, cory or ppo.
        hardware: The hardware that takes these minutes, and how they are known.
        flags: Keys that are changed in every configuration.
        needs: Keys that the user must give with --set, as they name local folders.
        values: Of the experiment's `over`.
        evaluate: Script, or cory.evaluation, and options that judge all runs when they are done.
    """

    config: str
    seeds: list[int]
    minutes: dict[str, float] = field(default_factory=dict)
    hardware: str = ""
    flags: dict[str, Verbatim] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    values: list[Verbatim] | None = None
    evaluate: str | None = None


@dataclass
class Experiment:
    """An experiment.

    Args:
        title: What it is, and where in the paper.
        question: What it answers.
        runs: By name.
        scales: By name: tiny, paper, ...
        baseline: Name of the runs that others are measured against. null: the first PPO.
        over: Key that is swept in every run; PPO keeps its own value if the key is about several agents.
        name: By which results know it: that of its file, or of the folder of an experiment.yaml.
    """

    title: str
    question: str
    runs: dict[str, Runs]
    scales: dict[str, Scale]
    baseline: str | None = None
    over: str | None = None
    name: str = field(init=False, default="")


# The parser itself looks these up by their names.
set_parsing_settings(
    import_path_allowlist=[f"{__name__}.{kind.__name__}" for kind in (Runs, Scale)]
)


def read_experiment(path: Path) -> Experiment:
    """An experiment's file.

    Raises:
        UserError: it is missing or has unknown keys.
    """
    if not path.is_file():
        raise UserError(
            "expected the file of an experiment, such as configs/experiments/imdb_curves.yaml of a checkout, got "
            f"{str(path)!r}, which is none{similar_file(path, YAML)}"
        )
    content = _content(path)
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_class_arguments(Experiment)
    try:
        experiment = Experiment(**vars(parser.instantiate(parser.parse_object(content))))
    except (ArgumentError, OSError, TypeError, UnicodeError) as error:
        raise UserError(f"{path}: {_explained(error)}") from None
    experiment.name = path.resolve().parent.name if path.stem == "experiment" else path.stem
    if not experiment.scales:
        raise UserError(f"{path}: scales: expected at least one, got none")
    for label, runs in experiment.runs.items():
        for scale in runs.at:
            if scale not in experiment.scales:
                raise UserError(
                    f"{path}: {label}.at: expected some of {list(experiment.scales)}, got {scale!r}"
                )
    return experiment


def _content(path: Path) -> dict[str, Any]:
    """What an experiment's file says. Raises a UserError if it is not YAML, names code, or has unknown keys."""
    try:
        content = read_yaml(path)
    except (OSError, UnicodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(
            f"{path}: expected a readable YAML file ({' '.join(str(error).split())})"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected an experiment's settings, got {content!r}")
    _check_block(path, "", content, Experiment)
    for block, kind in (("runs", Runs), ("scales", Scale)):
        parts = content.get(block)
        for name, part in parts.items() if isinstance(parts, dict) else ():
            if isinstance(part, dict):
                _check_block(path, f"{block}.{name}.", part, kind)
                if "from" in part:  # no name that an argument can have
                    part["from_"] = part.pop("from")
    return content


def _check_block(path: Path, prefix: str, block: Mapping[str, Any], kind: type) -> None:
    names = [field.name.rstrip("_") for field in fields(kind) if field.init]
    for key in block:
        if key not in names:
            near = nearest(str(key), names)
            hint = f"Did you mean {prefix + near!r}?" if near else f"Expected some of {names}"
            raise UserError(f"{path}: unknown key {f'{prefix}{key}'!r}. {hint}")


def _explained(error: Exception) -> str:
    """A message of the parser about an experiment's file, in the words of all others."""
    message = " ".join(str(error).split())
    if match := re.match("the following arguments are required: (.*)", message):
        return f"{match[1]}: expected a value, got none"
    # Of a run or a scale, whose name the parser does not say.
    block = r"Parser key \"(\w+)\": Problem with given class_path '[\w.]+': Parser key \"(\w+)\""
    return explained(re.sub(block, r'Parser key "\1.\2"', message), [])
