"""An experiment's file, and the runs that it defines at one of its scales."""

import hashlib
import json
import re
import shlex
import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from cory.cli.load import load
from cory.errors import UserError, expect
from cory.resume.differences import differences
from cory.tasks.config import OWN
from cory.tasks.kind import kind_of_script
from study.records import read

ROOT = Path(__file__).resolve().parent.parent  # of the checkout, with its scripts and configurations


@dataclass
class Runs:
    """Runs that differ in their seed, and in the experiment's `over`, alone.

    Args:
        script: What trains: imdb_train/cory.py, ..., or cory.train for a task of your own.
        flags: Keys that are changed in the configuration.
        at: Further changes by scale; `config` names another configuration. If given, only the scales named here have
            these runs.
    """

    script: str
    flags: dict[str, Any] = field(default_factory=dict)
    at: dict[str, dict[str, Any]] = field(default_factory=dict)


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
    flags: dict[str, Any] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    values: list[Any] | None = None
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
        over: Key that is swept in every run; PPO keeps its own value if the key is one of `cory`.
    """

    title: str
    question: str
    runs: dict[str, Runs]
    scales: dict[str, Scale]
    baseline: str | None = None
    over: str | None = None


@dataclass(frozen=True)
class Planned:
    """One run: its name in tables, its folder, its settings, and the command that makes it."""

    label: str
    folder: Path
    settings: dict[str, Any]
    command: list[str]
    minutes: float
    cwd: Path | None = ROOT

    def state(self) -> str:
        """`missing`, `begun` or `finished`.

        Raises:
            UserError: the folder holds a run of other settings.
        """
        if not (self.folder / "config.yaml").exists():
            return "missing"
        if not (self.folder / "metrics.jsonl").exists():
            return "begun"
        there = read(self.folder)
        changed = dict.fromkeys(differences(there.settings, self.settings))
        planned, wanted = there.settings["iterations"], self.settings["iterations"]
        if planned > wanted:  # a run of fewer is continued
            changed[f"iterations: {planned} -> {wanted}"] = None
        if changed:
            raise UserError(
                f"{self.folder}: expected a run of this experiment, got one of other settings ({'; '.join(changed)}). "
                "Name another folder with --runs, or remove that one"
            )
        done = there.stopped or there.iterations >= wanted
        return "finished" if there.complete and done else "begun"


def is_module(script: str) -> bool:
    """Whether a script is run with `python -m`, from the current directory, and not from the checkout."""
    return not script.endswith(".py")


def start(script: str) -> list[str]:
    """The beginning of the command that runs a script."""
    return [sys.executable, *(["-m"] if is_module(script) else []), script]


def checkout_file(name: str, what: str) -> Path:
    """A script or configuration of the repository, by its path in there.

    Raises:
        UserError: it is missing, as in an installation without a checkout.
    """
    path = ROOT / name
    if not path.is_file():
        raise UserError(
            f"{what}: expected a file {name!r} in {str(ROOT)!r}, got none. Experiments run scripts and configurations "
            "of a checkout of the repository: clone it, and run the command there"
        )
    return path


def read_experiment(path: Path) -> Experiment:
    """An experiment's file.

    Raises:
        UserError: it is missing or has unknown keys.
    """
    if not path.is_file():
        raise UserError(
            "expected the file of an experiment, such as configs/experiments/imdb_curves.yaml of a checkout, got "
            f"{str(path)!r}, which is none"
        )
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_class_arguments(Experiment)
    try:
        experiment = Experiment(**vars(parser.instantiate(parser.parse_path(str(path)))))
    except (ArgumentError, OSError, TypeError, UnicodeError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    for label, runs in experiment.runs.items():
        for scale in runs.at:
            if scale not in experiment.scales:
                raise UserError(f"{path}: {label}.at: expected some of {list(experiment.scales)}, got {scale!r}")
    return experiment


def plan(experiment: Experiment, scale_name: str, changes: dict[str, str], runs: Path) -> list[Planned]:
    """All runs of an experiment at a scale.

    Args:
        changes: keys that the user sets for every run.
        runs: the folder in which the runs' folders lie.

    Raises:
        UserError: there is no such scale, a key or a file is missing, a configuration is refused, or the experiment
            itself varies a key of `changes`.
    """
    if scale_name not in experiment.scales:
        raise UserError(f"scale: expected one of {list(experiment.scales)}, got {scale_name!r}")
    scale = experiment.scales[scale_name]
    for key in scale.needs:
        if key not in changes:
            raise UserError(f"scale {scale_name}: expected --set {key}=..., the name or folder to use, got none")
    if scale.evaluate and not is_module(judge := shlex.split(scale.evaluate)[0]):
        checkout_file(judge, "evaluate")
    planned = []
    for label, spec in experiment.runs.items():
        if spec.at and scale_name not in spec.at:
            continue
        changed = spec.flags | spec.at.get(scale_name, {})
        file = str(changed.pop("config", scale.config))
        kind = "cory" if is_module(spec.script) else Path(spec.script).stem
        if is_module(spec.script) and _settings(spec.script, file, *_flags(changed))["cory"]["num_agents"] == 1:
            kind = "ppo"
        concerned = experiment.over and not (experiment.over.startswith("cory.") and kind == "ppo")
        for value in scale.values if concerned and scale.values else [None]:
            own = changed if value is None else changed | {str(experiment.over): value}
            flags = _flags({**scale.flags, **own, **changes})
            unseeded = _settings(spec.script, file, *flags)
            base, usual = _settings(spec.script, file), _settings(spec.script, scale.config)
            for key in changes:
                varied = key in own or key == "seed" or _get(base, key) != _get(usual, key)
                expect(not varied, "--set", f"keys that the experiment does not vary, as it does for {label!r}", key)
            of_scale = _settings(spec.script, file, *_flags(scale.flags))
            for seed in scale.seeds:
                settings = unseeded | {"seed": seed}
                name = _name(spec.script, file, {k: v for k, v in own.items() if _get(of_scale, k) != v}, seed)
                folder = runs / scale_name / name
                command = [*start(spec.script), "--config", file, *flags, f"--seed={seed}"]
                command += ["--output", str(folder), "--resume", "auto"]
                share = _work(settings) / _work(base)
                cwd = None if is_module(spec.script) else ROOT
                planned.append(Planned(label, folder, settings, command, share * scale.minutes.get(kind, 0.0), cwd))
    return planned


def _work(settings: dict[str, Any]) -> float:
    """What a run computes, up to a factor of its model: docs/experiments.md, "Costs"."""
    ppo = settings["ppo"]
    return settings["iterations"] * ppo["batch_size"] * (4 + 6 * ppo["ppo_epochs"])


def _flags(values: dict[str, Any]) -> list[str]:
    return [f"--{key}={_text(value)}" for key, value in values.items()]


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str) else json.dumps(value)


def _short(value: Any) -> str:
    """A value in a folder's name: of a path its last part, of a list or a block a hash."""
    if isinstance(value, (list, dict)):
        return hashlib.sha256(_text(value).encode()).hexdigest()[:8]
    return Path(_text(value)).name


def _get(settings: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        settings = settings.get(part, {})
    return settings


def _name(script: str, file: str, changed: dict[str, Any], seed: int) -> str:
    setting = Path(file).stem
    if not is_module(script):
        task = Path(script).parent.name.removesuffix("_train")
        setting = f"{task}_{Path(script).stem}_{setting}"
    parts = [setting]
    parts += [f"{key.split('.')[-1]}={_short(value)}" for key, value in sorted(changed.items())]
    return re.sub(r"[^\w.=+-]", "_", "-".join([*parts, f"seed{seed}"]))


@cache
def _settings(script: str, file: str, *flags: str) -> dict[str, Any]:
    """The settings that a script would get, read as it reads them: with the configuration class of its task."""
    if is_module(script):
        if script != "cory.train":
            raise UserError(f"script: expected a script of the checkout, or cory.train, got {script!r}")
        return asdict(load(OWN.config, None, ["--config", file, *flags])[0])
    checkout_file(script, "script")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    kind = kind_of_script(script)
    path = checkout_file(file, "config")
    single_agent = Path(script).stem == "ppo"
    return asdict(load(kind.config, path, ["--config", str(path), *flags], single_agent=single_agent)[0])
