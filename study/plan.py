"""The runs that an experiment's file defines at one of its scales."""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from cory.command import flag_values, load
from cory.config import Config, blocks, changed
from cory.errors import UserError, one_of
from cory.evaluation.command import parse_settings
from cory.own_task import OWN
from cory.task_kinds import TaskKind, kind_of_script
from study.experiment_file import Experiment
from study.groups import group_name, is_about_several, value_of
from study.planned import Planned
from study.records import flat
from study.scripts import ROOT, checkout_file, is_module, start

LONGEST = 80  # letters of a group's name in the names of its folders


def plan(
    experiment: Experiment, scale_name: str, changes: dict[str, str], runs: Path
) -> list[Planned]:
    """All runs of an experiment at a scale.

    Args:
        changes: keys that the user sets for every run.
        runs: the runs' folders are those of RUNS/SCALE/EXPERIMENT.

    Raises:
        UserError: there is no such scale, a key or a file is missing, a configuration is refused, or the experiment
            itself varies a key of `changes`.
    """
    if scale_name not in experiment.scales:
        raise UserError(f"scale: expected one of {list(experiment.scales)}, got {scale_name!r}")
    scale = experiment.scales[scale_name]
    for key in scale.needs:
        if key not in changes:
            raise UserError(
                f"scale {scale_name}: expected --set {key}=..., the name or folder to use, got none"
            )
    planned = []
    for label, runs_of_label in experiment.runs.items():
        if not runs_of_label.at or scale_name in runs_of_label.at:
            try:
                planned += list(_plan_runs(experiment, scale_name, label, changes, runs))
            except UserError as error:
                raise UserError(f"runs.{label}: {error}") from None
    if not planned:
        raise UserError(
            f"scale: expected one at which the experiment has runs, got {scale_name!r}, which none has in its `at`"
        )
    _check_groups_differ(planned)
    names = {name for item in planned for name in (item.of.name, item.label)}
    if experiment.baseline and experiment.baseline not in names:
        raise UserError(f"baseline: expected one of {sorted(names)}, got {experiment.baseline!r}")
    if scale.evaluate:
        try:
            trained = _kind(experiment.runs[planned[0].label].script)
            _check_evaluation(shlex.split(scale.evaluate), planned[0], trained)
        except UserError as error:
            raise UserError(f"evaluate: {error}") from None
    return planned


def _check_groups_differ(planned: Sequence[Planned]) -> None:
    """Raises a UserError if two groups would have the same folders, or be the same runs."""
    group_of: dict[str, str] = {}
    for item in planned:
        group = group_of.setdefault(item.folder.name, item.of.name)
        if group != item.of.name:
            raise UserError(
                f"runs: expected groups whose names differ in their first {LONGEST} letters and digits, got {group!r} "
                f"and {item.of.name!r}"
            )
        settings = json.dumps(flat(item.settings), sort_keys=True, default=str)
        group = group_of.setdefault(settings, item.of.name)
        if group != item.of.name:
            raise UserError(
                f"runs: expected groups whose settings differ, got {group!r} and "
                f"{item.of.name!r}, which are the same"
            )


def _check_evaluation(command: Sequence[str], run: Planned, trained: TaskKind[Any]) -> None:
    """Raises a UserError if the evaluation of a run would refuse its options.

    A script of the user's own is not asked.
    """
    script, *options = command
    judge = None
    if is_module(script):
        one_of("script", ["cory.evaluation"], script)
    else:
        checkout_file(script, "script")
        try:
            judge = kind_of_script(script)
        except UserError:
            return
    settings = parse_settings(judge, None, [str(run.folder), *options])
    for name in ("task", "model", "sampling"):
        block = blocks(trained.config)[name]
        changed(block(**run.settings[name]), flag_values(block, getattr(settings, name)))


def _kind(script: str) -> TaskKind[Any]:
    """The kind of the task that a script, or cory.train, trains."""
    return OWN if is_module(script) else kind_of_script(script)


def _plan_runs(
    experiment: Experiment, scale_name: str, label: str, changes: dict[str, str], runs: Path
) -> Iterator[Planned]:
    """The runs of one name, at all values and seeds. See `plan`."""
    scale = experiment.scales[scale_name]
    script = experiment.runs[label].script
    flags = experiment.runs[label].flags | experiment.runs[label].at.get(scale_name, {})
    file = str(flags.pop("config", scale.config))
    of_file = _settings(script, file)
    method = _method(script, file, flags)

    values: Sequence[Any] = scale.values or [None]
    if experiment.over is None or (is_about_several(experiment.over) and method == "ppo"):
        values = [None]
    for value in values:
        varied = flags if value is None else flags | {str(experiment.over): value}
        for key in changes:
            usual = _settings(script, scale.config)
            if key in varied or key == "seed" or _get(of_file, key) != _get(usual, key):
                expected = f"keys that the experiment does not vary, as it does for {label!r}"
                raise UserError(f"--set: expected {expected}, got {key!r}")
        all_flags = _flags({**scale.flags, **varied, **changes})
        settings = _settings(script, file, *all_flags)
        group = group_name(label, experiment.over, value_of(settings, experiment.over))
        for seed in scale.seeds:
            folder = runs / scale_name / experiment.name / f"{_folder_name(group)}-seed{seed}"
            command = [*start(script), "--config", file, *all_flags, f"--seed={seed}"]
            command += ["--output", str(folder), "--resume", "auto"]
            yield Planned(
                label=label,
                folder=folder,
                settings=settings | {"seed": seed},
                command=command,
                minutes=_work(settings) / _work(of_file) * scale.minutes.get(method, 0.0),
                cwd=None if is_module(script) else ROOT,
                over=experiment.over,
                source=experiment.runs[label].from_,
                fingerprint=partial(_fingerprint, file, *all_flags) if is_module(script) else dict,
            )


def _method(script: str, file: str, flags: dict[str, Any]) -> str:
    """Of a run, by which the experiment's file says its minutes: `ppo`, where a single agent is trained, or `cory`."""
    if not is_module(script):
        return Path(script).stem
    return "ppo" if _settings(script, file, *_flags(flags))["cory"]["num_agents"] == 1 else "cory"


def _work(settings: dict[str, Any]) -> float:
    """What a run computes, up to a factor of its model."""
    ppo = settings["ppo"]
    return settings["iterations"] * ppo["batch_size"] * (4 + 6 * ppo["ppo_epochs"])


def _flags(values: dict[str, Any]) -> list[str]:
    return [f"--{key}={_text(value)}" for key, value in values.items()]


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str) else json.dumps(value)


def _get(settings: dict[str, Any], key: str) -> Any:
    """A setting by its dotted key; an empty mapping where there is none, which the parser then refuses by name."""
    value: Any = settings
    for part in key.split("."):
        value = value.get(part, {}) if isinstance(value, dict) else {}
    return value


def _folder_name(group: str) -> str:
    """The beginning of the names of a group's folders.

    >>> _folder_name("PPO, half the eta")
    'PPO_half_the_eta'
    """
    return re.sub(r"[^\w.=+-]+", "_", group)[:LONGEST]


@cache
def _settings(script: str, file: str, *flags: str) -> dict[str, Any]:
    """The settings that a script would get; not to be changed."""
    return asdict(_config(script, file, *flags))


@cache
def _config(script: str, file: str, *flags: str) -> Config:
    """The settings that a script would get, read as it reads them: with the configuration class of its task."""
    if is_module(script):
        if script != "cory.train":
            raise UserError(
                f"script: expected a script of the checkout, or cory.train, got {script!r}"
            )
        return load(OWN.config, None, ["--config", file, *flags])
    checkout_file(script, "script")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    path = checkout_file(file, "config")
    kind = kind_of_script(script)
    single_agent = Path(script).stem == "ppo"
    return load(kind.config, path, ["--config", str(path), *flags], single_agent=single_agent)


@cache
def _fingerprint(file: str, *flags: str) -> dict[str, Any]:
    """What a run of an own task would record of its reward and data, which do not depend on the seed.

    The files of its rewards are run, as they are to train.
    """
    config = load(OWN.config, None, ["--config", file, *flags])
    return OWN.make_task(config).fingerprint()
