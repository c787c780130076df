"""Plans the runs of an experiment at a scale. The scale sets configuration, seeds and the varied key's values."""

import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cory.command import flag_values, load
from cory.errors import UserError, one_of
from cory.evaluation.command import parse_settings
from cory.identity import is_local
from cory.own_task import OWN
from cory.run.settings import FREE, differences, flat
from cory.settings import blocks, changed
from cory.task_kinds import TaskKind, kind_of_script
from study.experiment_file import Experiment

ROOT = Path(__file__).resolve().parent.parent  # the checkout, with its scripts and configurations
LONGEST = 80  # how many characters of a group's name its folder names keep at most
IN_RUNS = re.compile(r'\{runs\}[^"]*')  # a path in a flag's value, which may be JSON


@dataclass(frozen=True)
class Planned:
    """A planned run.

    Args:
        label: the name of this run's entry in the experiment's file.
        group: the name shared by runs that differ only in their seed: the label, followed by the value if there is one.
        value: this run's value of the key that the experiment varies (`Experiment.over`). None: the experiment varies
            no key, or the key does not affect the run.
        folder: the run's folder.
        settings: all settings of the run.
        command: the command that trains or continues the run.
        cwd: the command's working directory. None: the current one.
        starts_from: the folders from which this run starts, such as an agent's. They belong to other runs of the same
            experiment.
    """

    label: str
    group: str
    value: Any
    folder: Path
    settings: dict[str, Any]
    command: list[str]
    cwd: Path | None = ROOT
    starts_from: tuple[Path, ...] = ()

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.settings["seed"]

    @property
    def log(self) -> Path:
        """The file to which the run and its evaluation append their output."""
        return Path(f"{self.folder}.log")

    @property
    def missing(self) -> str:
        """A message if a folder from which the run starts is missing; otherwise empty."""
        for folder in self.starts_from:
            if not folder.exists():
                return (
                    f"expected the folder {folder}, got none. If runs.csv has a row for the run that writes it, "
                    "delete that row to make the run again"
                )
        return ""


def plan(
    experiment: Experiment, scale_name: str, changes: Mapping[str, str], runs: Path
) -> list[Planned]:
    """Plans all runs of an experiment at a scale.

    Args:
        experiment: the experiment.
        scale_name: the scale.
        changes: settings that the user changes in every run, by key.
        runs: the root folder; runs have their folders in RUNS/SCALE/EXPERIMENT.

    Raises:
        UserError: the scale does not exist, a key or a file is missing, a configuration is refused, or the experiment
            varies a key of `changes`.
    """
    one_of("scale", list(experiment.scales), scale_name)
    scale = experiment.scales[scale_name]
    for key in scale.needs:
        if key not in changes:
            raise UserError(f"--set: expected {key}=..., the name or folder to use, got none")
    planned = []
    for label, runs_of_label in experiment.runs.items():
        if not runs_of_label.at or scale_name in runs_of_label.at:
            try:
                planned += list(_plan_runs(experiment, scale_name, label, changes, runs))
            except UserError as error:
                raise UserError(f"runs.{label}: {error}") from None
    if not planned:
        raise UserError(
            f"scale: expected a scale at which the experiment has runs, got {scale_name!r}"
        )
    _check_groups_differ(planned)
    _check_order(planned)
    if experiment.baseline:
        names = sorted({name for item in planned for name in (item.group, item.label)})
        one_of("baseline", names, experiment.baseline)
    if scale.evaluate:
        try:
            _check_evaluation(scale.evaluate, planned[0], experiment.runs[planned[0].label].script)
        except UserError as error:
            raise UserError(f"evaluate: {error}") from None
    return planned


def _check_groups_differ(planned: Sequence[Planned]) -> None:
    """Raises a UserError if two groups would have the same folders or the same settings."""
    for one, other in itertools.combinations(first_of_groups(planned), 2):
        if one.folder == other.folder:
            raise UserError(
                f"runs: expected names that give different folders, got {one.folder.name} twice"
            )
        if one.settings == other.settings:
            raise UserError(
                f"runs: expected groups whose settings differ, got {one.group!r} and {other.group!r}"
            )


def _check_order(planned: Sequence[Planned]) -> None:
    """Raises a UserError if a run starts from a run that is not an earlier group's with the same seed.

    All runs of a seed are made before those of the next seed, so a run of another seed may come too late.
    """
    earlier: set[tuple[int, Path]] = set()
    for item in planned:
        for folder in item.starts_from:
            if not any((item.seed, parent) in earlier for parent in folder.parents):
                raise UserError(
                    f"runs.{item.label}: expected a folder of an earlier group's run with seed {item.seed}, "
                    f"got {str(folder)!r}"
                )
        earlier.add((item.seed, item.folder))


def first_of_groups(planned: Sequence[Planned]) -> list[Planned]:
    """Returns the first run of each group."""
    firsts: dict[str, Planned] = {}
    for item in planned:
        firsts.setdefault(item.group, item)
    return list(firsts.values())


def varied_keys(planned: Sequence[Planned]) -> list[str]:
    """Returns the dotted keys of settings in which groups differ, except the seed and keys in `FREE`."""
    pairs = itertools.combinations(first_of_groups(planned), 2)
    keys = {key: None for a, b in pairs for key in differences(a.settings, b.settings, FREE)}
    existing = {key for item in planned for key in flat(item.settings)}
    return [key for key in keys if key in existing and key != "seed"]


def _check_evaluation(command: str, run: Planned, trained_by: str) -> None:
    """Raises a UserError if a run's evaluation would refuse the command's options.

    Options of the user's own scripts are not checked.
    """
    script, *options = shlex.split(command)
    task_kind = None
    if is_module(script):
        one_of("script", ["cory.evaluation"], script)
    else:
        checkout_file(script, "script")
        try:
            task_kind = kind_of_script(script)
        except UserError:
            return
    settings = parse_settings(task_kind, None, [str(run.folder), *options])
    for name in ("task", "model", "sampling"):
        block = blocks(_kind(trained_by).config)[name]
        changed(block(**run.settings[name]), flag_values(block, getattr(settings, name)))


def _plan_runs(
    experiment: Experiment, scale_name: str, label: str, changes: Mapping[str, str], runs: Path
) -> Iterator[Planned]:
    """Plans the runs of one label, for all values and seeds; see `plan`."""
    scale = experiment.scales[scale_name]
    script = experiment.runs[label].script
    flags = experiment.runs[label].flags | experiment.runs[label].at.get(scale_name, {})
    file = str(flags.pop("config", scale.config))
    file_settings = flat(_settings(script, file))
    scale_settings = flat(_settings(script, scale.config))

    needs_several = experiment.over is not None and _needs_several_agents(experiment.over)
    values: Sequence[Any] = scale.values or [None]
    if experiment.over is None or (
        needs_several and is_single(_settings(script, file, *_flags(flags)))
    ):
        values = [None]
    for value in values:
        varied = flags if value is None else flags | {str(experiment.over): value}
        for key in changes:
            differs = file_settings.get(key) != scale_settings.get(key)
            if key in varied or key == "seed" or differs:
                raise UserError(
                    f"--set: expected keys that the experiment does not vary, got {key!r}"
                )
        all_flags = _flags({**scale.flags, **varied, **changes})
        settings = _settings(script, file, *all_flags)  # placeholders are not filled yet
        group = label
        if experiment.over is not None and not (needs_several and is_single(settings)):
            value = flat(settings)[experiment.over]
            if value is not None:
                group = f"{label}, {experiment.over.split('.')[-1]} {value}"
        for seed in scale.seeds:
            home = runs / scale_name / experiment.name
            folder = home / f"{_folder_name(group)}-seed{seed}"
            filled = [_filled(flag, home, seed) for flag in all_flags]
            command = [*python_command(script), "--config", file, *filled, f"--seed={seed}"]
            command += ["--output", str(folder), "--resume", "auto"]
            yield Planned(
                label=label,
                group=group,
                value=value,
                folder=folder,
                settings=settings | {"seed": seed},
                command=command,
                cwd=None if is_module(script) else ROOT,
                starts_from=_starts_from(all_flags, home, seed),
            )


def is_local_path(value: str) -> bool:
    """Whether a value of --set names a file or folder that other machines may not have."""
    return is_local(value) or ("/" in value and os.path.exists(value))


def is_single(settings: Mapping[str, Any]) -> bool:
    """Whether a single agent is trained in a single role. Keys for several agents then have no effect."""
    cory = settings["cory"]
    return cory["num_agents"] == 1 and cory.get("chain_length") in (None, 1)


def _needs_several_agents(key: str) -> bool:
    """Whether a key has an effect only with several agents."""
    return key == "branches" or (key.startswith("cory.") and key != "cory.reset_every")


def is_module(script: str) -> bool:
    """Whether a script is run with `python -m` in the current directory, instead of in the checkout."""
    return not script.endswith(".py")


def python_command(script: str) -> list[str]:
    """Returns the beginning of the command that runs a script."""
    return [sys.executable, *(["-m"] if is_module(script) else []), script]


def checkout_file(name: str, what: str) -> Path:
    """Returns the path of a script or configuration of the repository.

    Args:
        name: the path relative to the repository's root.
        what: the setting that names the file, for the error message.

    Raises:
        UserError: the file is missing, for example in an installation without a checkout.
    """
    path = ROOT / name
    if not path.is_file():
        raise UserError(
            f"{what}: expected a file of a checkout of the repository, got {name!r}, which is not in {str(ROOT)!r}"
        )
    return path


def _kind(script: str) -> TaskKind[Any]:
    """Returns the kind of task that a script, or cory.train, trains."""
    return OWN if is_module(script) else kind_of_script(script)


def _flags(values: Mapping[str, Any]) -> list[str]:
    return [f"--{key}={_text(value)}" for key, value in values.items()]


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str) else json.dumps(value)


def _filled(text: str, home: Path, seed: int) -> str:
    """Fills a flag's placeholders: `{runs}`, the folder of the experiment's runs, and `{seed}`."""
    return text.replace("{runs}", str(home)).replace("{seed}", str(seed))


def _starts_from(flags: Sequence[str], home: Path, seed: int) -> tuple[Path, ...]:
    """Returns the folders named in flags that belong to other runs of the experiment."""
    paths = [path for flag in flags for path in IN_RUNS.findall(flag)]
    return tuple(Path(_filled(path, home, seed)) for path in paths)


def _folder_name(group: str) -> str:
    """Returns the beginning of a group's folder names.

    >>> _folder_name("PPO, half the eta")
    'PPO_half_the_eta'
    """
    return re.sub(r"[^\w.=+-]+", "_", group)[:LONGEST]


@cache
def _settings(script: str, file: str, *flags: str) -> dict[str, Any]:
    """Returns the settings that a script would get. The result is cached, so callers must not change it."""
    if is_module(script):
        if script != "cory.train":
            raise UserError(
                f"script: expected a script of the checkout, or cory.train, got {script!r}"
            )
        return asdict(load(OWN.config, None, ["--config", file, *flags]))
    checkout_file(script, "script")
    path = checkout_file(file, "config")
    kind = kind_of_script(script)
    single_agent = Path(script).stem == "ppo"
    arguments = ["--config", str(path), *flags]
    return asdict(load(kind.config, path, arguments, single_agent=single_agent))
