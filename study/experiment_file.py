"""An experiment's file: what it may say, and how it is read."""

from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from cory.errors import UserError
from cory.settings import Settings, from_data, read_yaml


@dataclass
class Runs(Settings):
    """Runs that differ in their seed, and in the experiment's `over`, alone.

    Args:
        script: What trains: imdb_train/cory.py, ..., or cory.train for a task of your own.
        from_: `from` in the file: an experiment that has a group of this name, whose rows are taken. Its file lies
            beside.
        flags: Keys that are changed in the configuration. `{seed}` in a text stands for the run's seed,
            `{runs}` for the folder of the experiment's runs: `{runs}/PPO-seed{seed}/agent_1` is an agent
            of a group before.
        at: Further changes by scale; `config` names another configuration. If given, only the scales named here have
            these runs.
    """

    script: str
    from_: str | None = Field(default=None, alias="from")
    flags: dict[str, Any] = Field(default_factory=dict)
    at: dict[str, dict[str, Any]] = Field(default_factory=dict)


@dataclass
class Scale(Settings):
    """A size at which the experiment runs.

    Args:
        config: Configuration, read by all scripts of the task.
        seeds: A run for each.
        flags: Keys that are changed in every configuration.
        needs: Keys that the user must give with --set, as they name local folders.
        values: Of the experiment's `over`.
        evaluate: Script, or cory.evaluation, and options that judge all runs when they are done.
    """

    config: str
    seeds: list[int]
    flags: dict[str, Any] = Field(default_factory=dict)
    needs: list[str] = Field(default_factory=list)
    values: list[Any] | None = None
    evaluate: str | None = None


@dataclass
class Experiment(Settings):
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
    name: str = Field(init=False, default="")


def read_experiment(path: Path) -> Experiment:
    """An experiment's file.

    Raises:
        UserError: it is missing, has unknown keys, lacks some, or has values of other types.
    """
    if not path.is_file():
        raise UserError(
            "expected the file of an experiment, such as configs/experiments/imdb_curves.yaml of a checkout, got "
            f"{str(path)!r}, which is none"
        )
    content = read_yaml(path)
    try:
        experiment = from_data(Experiment, content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    experiment.name = path.resolve().parent.name if path.stem == "experiment" else path.stem
    if not experiment.scales:
        raise UserError(f"{path}: scales: expected at least one, got none")
    for name, at in experiment.scales.items():
        if (at.values is None) != (experiment.over is None):
            raise UserError(
                f"{path}: scales.{name}.values: expected values exactly where the experiment has `over`, got "
                f"{at.values}, over {experiment.over}"
            )
    for label, runs in experiment.runs.items():
        for scale in runs.at:
            if scale not in experiment.scales:
                raise UserError(
                    f"{path}: {label}.at: expected some of {list(experiment.scales)}, got {scale!r}"
                )
        if runs.from_ is not None and not path.with_name(f"{runs.from_}.yaml").is_file():
            raise UserError(
                f"{path}: {label}.from: expected an experiment beside this file, got {runs.from_!r}"
            )
    return experiment
