"""Defines the keys of an experiment's file, and reads the file."""

from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from cory.errors import UserError
from cory.settings import Settings, from_data, read_yaml


@dataclass
class Runs(Settings):
    """Runs that differ only in their seed and in the value of the swept key (`over`).

    Args:
        script: The training script: imdb_train/cory.py, ..., or cory.train for a task of your own.
        flags: Keys changed in the configuration. In a value that is a string, `{seed}` stands for the run's seed and
            `{runs}` for the folder of the experiment's runs: `{runs}/PPO-seed{seed}/agent_1` is an agent of the
            run PPO with the same seed. The file must name PPO earlier.
        at: Further changes by scale; `config` names another configuration. If `at` is given, the runs exist only at the
            scales that it names.
    """

    script: str
    flags: dict[str, Any] = Field(default_factory=dict)
    at: dict[str, dict[str, Any]] = Field(default_factory=dict)


@dataclass
class Scale(Settings):
    """A size at which the experiment runs.

    Args:
        config: Configuration file for all scripts.
        seeds: Seeds; each has a run.
        flags: Keys changed in every configuration.
        needs: Keys that name local folders, so the user must give them with --set.
        values: Values of the swept key.
        evaluate: Command that evaluates each run when it ends: a script, or cory.evaluation, and its options.
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
        title: Title, with the place in the paper.
        question: Question that the experiment answers.
        runs: Runs by name.
        scales: Scales by name: tiny, paper, ...
        baseline: Name of the runs with which others are compared. null: the first runs with a single agent.
        over: Key whose values are swept. If the key has an effect only with several agents, runs of a single agent are
            not swept.
        name: Name in results: the file's name or, for a file experiment.yaml, its folder's name.
    """

    title: str
    question: str
    runs: dict[str, Runs]
    scales: dict[str, Scale]
    baseline: str | None = None
    over: str | None = None
    name: str = Field(init=False, default="")


def read_experiment(path: Path) -> Experiment:
    """Reads an experiment's file.

    Raises:
        UserError: the file is missing, has unknown or missing keys, or values of wrong types.
    """
    if not path.is_file():
        raise UserError(
            "expected an experiment's file, such as configs/experiments/imdb_curves.yaml of a checkout, got "
            f"{str(path)!r}, which is not a file"
        )
    content = read_yaml(path)
    try:
        experiment = from_data(Experiment, content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    experiment.name = path.resolve().parent.name if path.stem == "experiment" else path.stem
    if not experiment.scales:
        raise UserError(f"{path}: scales: expected at least one, got none")
    for name, scale in experiment.scales.items():
        for key, items in (("seeds", scale.seeds), ("values", scale.values or [])):
            if repeated := [item for item in items if items.count(item) > 1]:
                raise UserError(
                    f"{path}: scales.{name}.{key}: expected each once, got {repeated[0]!r} twice"
                )
        if (scale.values is None) != (experiment.over is None):
            raise UserError(
                f"{path}: scales.{name}.values: expected both values and the experiment's `over`, or neither, got "
                f"values {scale.values} and over {experiment.over}"
            )
    for label, runs in experiment.runs.items():
        for scale_name in runs.at:
            if scale_name not in experiment.scales:
                raise UserError(
                    f"{path}: {label}.at: expected scales from {list(experiment.scales)}, got {scale_name!r}"
                )
    return experiment
