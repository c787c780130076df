"""An experiment's file, and the runs that it defines at one of its scales."""

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from cory.cli.arguments import Verbatim, typed
from cory.cli.load import load
from cory.cli.messages import YAML, explained, nearest, similar_file
from cory.config import Config, blocks, changed
from cory.errors import UserError, one_of
from cory.evaluation.agents import agent_folders
from cory.evaluation.command import parse_settings
from cory.provenance.models import model_identity
from cory.resume.differences import FREE, ROUNDING, differences_in_training, in_words
from cory.tasks.config import OWN
from cory.tasks.kind import TaskKind, kind_of_script
from cory.unused import unread
from study.groups import Group, group_name, is_about_several, value_of
from study.records import flat, read

# Keys that came after results had been measured, and the value at which they change nothing. There they
# are no part of a run's hash, so that the rows of earlier versions still count.
LATER_KEYS: dict[str, Any] = {"sampling.cache": "dynamic"}
# Keys that do not change what is trained, but what is measured of it.
MEASURES = {"task.metrics", "task.extract", "task.accepts"}
FIRST_RUN = "first_run.json"  # of a folder of results: see `study/check_results.py`
ROOT = Path(__file__).resolve().parent.parent  # the checkout, with its scripts and configurations


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
    """

    title: str
    question: str
    runs: dict[str, Runs]
    scales: dict[str, Scale]
    baseline: str | None = None
    over: str | None = None


@dataclass(frozen=True)
class Planned:
    """One run.

    Args:
        label: its name in the experiment's file.
        folder: where it is made.
        settings: all of them.
        command: that makes it, in the folder `cwd`; None: the current one.
        minutes: what the file says that it takes.
        over: the experiment's key.
        resolve: the folder of a built-in model, or the name itself.
        fingerprint: hashes of what the reward and data files of an own task hold now; empty for a script's task.
    """

    label: str
    folder: Path
    settings: dict[str, Any]
    command: list[str]
    minutes: float
    cwd: Path | None = ROOT
    over: str | None = None
    resolve: Callable[[str], str] = str
    fingerprint: Callable[[], dict[str, Any]] = dict

    @property
    def of(self) -> Group:
        """Its group in tables."""
        value = value_of(self.settings, self.over)
        return Group(group_name(self.label, self.over, value), self.label, value)

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.settings["seed"]

    def key(self) -> str:
        """A hash of what decides on its numbers: the settings, and the content of local models, data and rewards.

        It is the same on every machine. The code's version is no part of it, nor is a key of `LATER_KEYS`, or one of
        `MEASURES` that is not set.
        """
        free = FREE - {"iterations"} - ROUNDING - MEASURES
        decisive = {
            key: self._content(value)
            for key, value in flat(self.settings).items()
            if key not in free and key.split(".")[0] not in free
            if key not in LATER_KEYS or value != LATER_KEYS[key]
            if key not in MEASURES or value
        }
        return hashlib.sha256(
            json.dumps(decisive, sort_keys=True, default=str).encode()
        ).hexdigest()[:12]

    def _content(self, value: Any) -> Any:
        """A hash in place of the name of a local file, such as FILE.py:NAME, or of a local folder."""
        if isinstance(value, list):
            return [self._content(one) for one in value]
        if isinstance(value, dict):
            return {key: self._content(one) for key, one in value.items()}
        if not isinstance(value, str) or not value or "\n" in value:
            return value
        try:
            name, colon, function = self.resolve(value).partition(":")
        except UserError:  # a built-in model that is not made yet
            return value
        path = (self.cwd or Path()) / name
        # A name such as `train` may happen to be that of a folder, too, and so may a stop text such as `.`.
        if ("/" not in name and "." not in name) or path.name in ("", "..") or name == ".":
            return value
        identity = _identity(path)
        return value if identity is None else identity + colon + function

    def state(self) -> str:
        """`missing`, `begun` or `finished`.

        Raises:
            UserError: the folder holds a run of other settings, a finished one of other rewards, data or models, or one
                of fewer iterations that is finished and has no checkpoints. One that has begun compares its rewards,
                data and models itself when it is resumed.
        """
        if not (self.folder / "config.yaml").exists():
            return "missing"
        if not (self.folder / "metrics.jsonl").exists():
            return "begun"
        run = read(self.folder)
        changed = dict.fromkeys(map(str, differences_in_training(run.settings, self.settings)))
        planned = run.settings["iterations"]
        wanted = self.settings["iterations"]
        can_go_on = run.problems or any((self.folder / "checkpoints").glob("iter-*"))
        if planned > wanted or (planned < wanted and not can_go_on):
            changed[f"iterations: {planned} -> {wanted}"] = None
        ended = run.stopped or run.iterations >= wanted
        finished = ended and not run.problems
        if finished and not changed:
            changed = dict.fromkeys(self._changed_files(run.settings))
        if changed:
            raise UserError(
                f"{self.folder}: expected a run of this experiment, got one of other settings ({'; '.join(changed)}). "
                "Name another folder with --runs, or remove that one"
            )
        return "finished" if finished else "begun"

    def check_agents(self) -> None:
        """Raises a UserError if the run, which is finished, has no agents that could be evaluated."""
        if not agent_folders(self.folder):
            raise UserError(
                f"{self.folder}: expected a run with its agents, to evaluate them, got one that has none, as after "
                "--discard-agents. Name another folder with --runs, or remove that one, to train it again"
            )

    def _changed_files(self, recorded: dict[str, Any]) -> Iterator[str]:
        """What has changed since a run of these settings recorded it: rewards, data, and the folders of its models."""
        now = self.settings | {"fingerprint": self.fingerprint()}
        yield from in_words(differences_in_training(recorded, now), recorded, now)
        models = (recorded.get("fingerprint") or {}).get("models") or {}
        for key, model in models.items():
            folder = (self.cwd or Path()) / model["name"]
            # A name such as `tiny` is that of a built-in model, whatever folder has it, too.
            if "/" not in model["name"] or not folder.is_dir():
                continue
            if model["identity"] not in (None, model_identity(str(folder))):
                yield f"the model {model['name']} of {key} has changed"


@cache
def _identity(path: Path) -> str | None:
    """A hash of a file, or of a folder's model and of the names and sizes of its files; None: there is none."""
    try:
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        if not path.is_dir():
            return None
    except OSError:  # a prompt, which is too long for a name
        return None
    files = sorted(
        (str(file.relative_to(path)), file.stat().st_size)
        for file in path.rglob("*")
        if file.is_file()
    )
    sizes = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:8]
    return f"{model_identity(str(path))} {sizes}"


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
            f"{str(path)!r}, which is none{similar_file(path, YAML)}"
        )
    _check_keys(path)
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_class_arguments(Experiment)
    try:
        experiment = Experiment(**vars(parser.instantiate(parser.parse_path(str(path)))))
    except (ArgumentError, OSError, TypeError, UnicodeError) as error:
        raise UserError(f"{path}: {_explained(error)}") from None
    if not experiment.scales:
        raise UserError(f"{path}: scales: expected at least one, got none")
    for label, runs in experiment.runs.items():
        for scale in runs.at:
            if scale not in experiment.scales:
                raise UserError(
                    f"{path}: {label}.at: expected some of {list(experiment.scales)}, got {scale!r}"
                )
    return experiment


def _check_keys(path: Path) -> None:
    """Raises a UserError if an experiment's file is not YAML, or has unknown keys."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
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


def _check_block(path: Path, prefix: str, block: Mapping[str, Any], kind: type) -> None:
    names = [field.name for field in fields(kind)]
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


def plan(
    experiment: Experiment, scale_name: str, changes: dict[str, str], runs: Path
) -> list[Planned]:
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
    return _in_folders_of_their_own(planned)


def _check_groups_differ(planned: Sequence[Planned]) -> None:
    """Raises a UserError if two groups would be the same runs, but for what nothing reads."""
    group_of: dict[str, str] = {}
    for item in planned:
        not_read = unread(item.settings)
        read = {key: value for key, value in flat(item.settings).items() if key not in not_read}
        group = group_of.setdefault(json.dumps(read, sort_keys=True, default=str), item.of.name)
        if group != item.of.name:
            raise UserError(
                f"runs: expected groups whose settings differ in what a run reads, got {group!r} and "
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
        changed(block(**run.settings[name]), typed(block, getattr(settings, name)))


def _kind(script: str) -> TaskKind[Any]:
    """The kind of the task that a script, or cory.train, trains."""
    return OWN if is_module(script) else kind_of_script(script)


def _in_folders_of_their_own(planned: Sequence[Planned]) -> list[Planned]:
    """The runs, where a folder would be that of several settings with a hash of them in its name."""
    texts = [json.dumps(item.settings, sort_keys=True, default=str) for item in planned]
    settings_of: dict[Path, set[str]] = {}
    for item, text in zip(planned, texts, strict=True):
        settings_of.setdefault(item.folder, set()).add(text)
    result = []
    for item in planned:
        if len(settings_of[item.folder]) > 1:
            beginning, _, seed = item.folder.name.rpartition("-")
            without_seed = {key: to for key, to in item.settings.items() if key != "seed"}
            folder = item.folder.with_name(f"{beginning}-{_hash(without_seed)}-{seed}")
            command = [str(folder) if part == str(item.folder) else part for part in item.command]
            item = replace(item, folder=folder, command=command)
        result.append(item)
    return result


def _plan_runs(
    experiment: Experiment, scale_name: str, label: str, changes: dict[str, str], runs: Path
) -> Iterator[Planned]:
    """The runs of one name, at all values and seeds. See `plan`."""
    scale = experiment.scales[scale_name]
    script = experiment.runs[label].script
    flags = experiment.runs[label].flags | experiment.runs[label].at.get(scale_name, {})
    file = str(flags.pop("config", scale.config))
    of_file = _settings(script, file)
    of_scale = _settings(script, file, *_flags(scale.flags))
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
        in_name = {key: to for key, to in varied.items() if _get(of_scale, key) != to}
        for seed in scale.seeds:
            folder = runs / scale_name / _name(script, file, in_name, seed)
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
                resolve=_config(script, file, *all_flags).resolve,
                fingerprint=partial(_fingerprint, file, *all_flags) if is_module(script) else dict,
            )


def _method(script: str, file: str, flags: dict[str, Any]) -> str:
    """Of a run, by which the experiment's file says its minutes: `ppo`, where a single agent is trained, or `cory`."""
    if not is_module(script):
        return Path(script).stem
    return "ppo" if _settings(script, file, *_flags(flags))["cory"]["num_agents"] == 1 else "cory"


def _work(settings: dict[str, Any]) -> float:
    """What a run computes, up to a factor of its model: docs/experiments.md, "Costs"."""
    ppo = settings["ppo"]
    return settings["iterations"] * ppo["batch_size"] * (4 + 6 * ppo["ppo_epochs"])


def _flags(values: dict[str, Any]) -> list[str]:
    return [f"--{key}={_text(value)}" for key, value in values.items()]


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str) else json.dumps(value)


def _short(value: Any) -> str:
    """A value in a folder's name: of a path its last part, of a list, a block or a long text a hash."""
    name = Path(_text(value)).name
    return _hash(value) if isinstance(value, (list, dict)) or len(name) > 60 else name


def _hash(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()[:8]


def _get(settings: dict[str, Any], key: str) -> Any:
    """A setting by its dotted key; an empty mapping where there is none, which the parser then refuses by name."""
    value: Any = settings
    for part in key.split("."):
        value = value.get(part, {}) if isinstance(value, dict) else {}
    return value


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
