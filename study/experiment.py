"""Runs an experiment: every method, value and seed that its file names, then compares them.

    python -m study.experiment configs/experiments/imdb_curves.yaml                             # embedded size
    python -m study.experiment configs/experiments/imdb_curves.yaml --scale paper --dry-run     # one command line a run
    python -m study.experiment FILE --jobs 2 --out results/imdb_curves

Runs that are finished are skipped, interrupted ones resumed. Experiments share runs: a run's folder is named by its
configuration, what is changed in it, and its seed.
"""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from cory.config import Config, UserError
from cory.run.command_line import main
from cory.run.settings import differences, load
from study.compare import write
from study.comparison import Comparison, group
from study.records import read

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Runs:
    """Runs that differ in their seed, and in the experiment's `over`, alone.

    Args:
        script: What trains: imdb_train/cory.py, ...
        flags: Keys that are changed in the configuration.
        at: More of them, by scale.
        with_values: Whether there is a run for each value of the experiment's `over`; else it keeps its own.
        config: Configuration by scale, where it is not the scale's.
        scales: Where these runs take part. null: everywhere.
    """

    script: str
    flags: dict[str, Any] = field(default_factory=dict)
    at: dict[str, dict[str, Any]] = field(default_factory=dict)
    with_values: bool = True
    config: dict[str, str] = field(default_factory=dict)
    scales: list[str] | None = None


@dataclass
class Scale:
    """A size at which the experiment runs.

    Args:
        config: Configuration; {method} stands for the script's name, cory or ppo.
        seeds: A run for each.
        minutes: What a run of `config` takes, by script's name.
        hardware: On what, and how that is known.
        flags: Keys that are changed in every configuration.
        needs: Keys that the user must give with --set, as they name local folders.
        values: Of the experiment's `over`.
        evaluate: Script and options that judge all runs when they are done.
    """

    config: str
    seeds: list[int]
    minutes: dict[str, float]
    hardware: str
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
        over: Key of which every run is made with several values.
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

    def state(self) -> str:
        """`missing`, `begun` or `finished`.

        Raises:
            UserError: the folder holds a run of other settings.
        """
        if not (self.folder / "config.yaml").exists():
            return "missing"
        there = read(self.folder) if (self.folder / "metrics.jsonl").exists() else None
        changed = [
            line
            for line in differences(there.settings if there else {}, self.settings)
            if not re.search("-> 'tiny(_large)?'$", line)  # stands for the folder of the embedded default
        ]
        if there and changed:
            raise UserError(
                f"{self.folder}: expected a run of this experiment, got one of other settings ({'; '.join(changed)}). "
                "Name another folder with --runs, or take that one away"
            )
        long_enough = there is not None and there.iterations >= self.settings["iterations"]
        return "finished" if there and there.complete and long_enough else "begun"


def read_experiment(path: Path) -> Experiment:
    """An experiment's file.

    Raises:
        UserError: it is missing or holds what an experiment has not.
    """
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_class_arguments(Experiment)
    try:
        return Experiment(**vars(parser.instantiate(parser.parse_path(str(path)))))
    except (ArgumentError, OSError, TypeError, UnicodeError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None


def plan(experiment: Experiment, scale_name: str, changes: dict[str, str], runs: Path) -> list[Planned]:
    """All runs of an experiment at a scale.

    Args:
        changes: keys that the user sets for every run.
        runs: the folder in which the runs' folders lie.

    Raises:
        UserError: there is no such scale, a key is missing, or a configuration is refused.
    """
    if scale_name not in experiment.scales:
        raise UserError(f"scale: expected one of {list(experiment.scales)}, got {scale_name!r}")
    scale = experiment.scales[scale_name]
    for key in scale.needs:
        if key not in changes:
            raise UserError(f"scale {scale_name}: expected --set {key}=..., the name or folder to use, got none")
    planned = []
    for label, spec in experiment.runs.items():
        if spec.scales is not None and scale_name not in spec.scales:
            continue
        kind = Path(spec.script).stem
        file = spec.config.get(scale_name, scale.config.format(method=kind))
        varied = experiment.over if spec.with_values else None
        for value in scale.values if varied and scale.values else [None]:
            own = spec.flags | spec.at.get(scale_name, {})
            own |= {varied: value} if varied and value is not None else {}
            flags = [f"--{k}={_text(v)}" for k, v in {**scale.flags, **own, **changes}.items()]
            unseeded = _settings(spec.script, ROOT / file, *flags)
            base = _settings(spec.script, ROOT / file)
            of_scale = _settings(spec.script, ROOT / file, *(f"--{k}={_text(v)}" for k, v in scale.flags.items()))
            for seed in scale.seeds:
                settings = unseeded | {"seed": seed}
                name = _name(spec.script, file, {k: v for k, v in own.items() if _get(of_scale, k) != v}, seed)
                folder = runs / scale_name / name
                command = [sys.executable, spec.script, "--config", file, *flags, f"--seed={seed}"]
                command += ["--output", str(folder), "--resume", "auto"]
                share = _work(settings) / _work(base)
                planned.append(Planned(label, folder, settings, command, share * scale.minutes.get(kind, 0.0)))
    return planned


def _work(settings: dict[str, Any]) -> float:
    """What a run computes, up to a factor of its model: docs/experiments.md, "Costs"."""
    ppo = settings["ppo"]
    return settings["iterations"] * ppo["batch_size"] * (4 + 6 * ppo["ppo_epochs"])


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _get(settings: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        settings = settings.get(part, {})
    return settings


def _name(script: str, file: str, changed: dict[str, Any], seed: int) -> str:
    task = Path(script).parent.name.removesuffix("_train")
    parts = [f"{task}_{Path(file).stem}"]
    parts += [f"{key.split('.')[-1]}={Path(_text(value)).name}" for key, value in sorted(changed.items())]
    return re.sub(r"[^\w.=+-]", "_", "-".join([*parts, f"seed{seed}"]))


@cache
def _settings(script: str, file: Path, *flags: str) -> dict[str, Any]:
    """The settings that a script would have, read as it reads them: by the configuration class of its task."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    task = importlib.import_module(f"{Path(script).parent.name}.task")
    (kind,) = (c for c in vars(task).values() if isinstance(c, type) and issubclass(c, Config) and c is not Config)
    return asdict(load(kind, file, ["--config", str(file), *flags])[0])


def run_all(planned: Sequence[Planned], jobs: int, threads: int) -> list[Planned]:
    """Runs what is planned, `jobs` at a time, each with its output in FOLDER.log.

    Returns:
        those that failed.
    """
    failed = []
    count = [0]

    def run(item: Planned) -> None:
        started = time.perf_counter()
        item.folder.parent.mkdir(parents=True, exist_ok=True)
        env = os.environ | {"OMP_NUM_THREADS": str(threads)} if jobs > 1 else dict(os.environ)
        with open(f"{item.folder}.log", "a", encoding="utf-8") as log:
            status = subprocess.run(item.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=env).returncode
        count[0] += 1
        how = f"{time.perf_counter() - started:.0f} s" if not status else f"FAILED ({status}), see {item.folder}.log"
        print(f"[{count[0]}/{len(planned)}] {item.folder.name}: {how}", flush=True)
        if status:
            failed.append(item)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(run, planned))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def evaluate(command: str, planned: Sequence[Planned], folder: Path, out: Path) -> None:
    """Judges all runs by a script of their task, into `folder`, unless it is there; table and figure also go to `out`.

    Raises:
        UserError: the script failed.
    """
    if (folder / "evaluation.md").exists():
        print(f"Evaluated already: {folder}")
    else:
        script, *options = shlex.split(command)
        runs = [str(item.folder) for item in planned]
        done = subprocess.run([sys.executable, script, *runs, *options, "--output", str(folder)], cwd=ROOT)
        if done.returncode:
            raise UserError(f"{command}: failed with status {done.returncode}")
    for file in [*folder.glob("evaluation.*"), *folder.glob("*.png")]:
        shutil.copyfile(file, out / file.name)


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.experiment`: see the module."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, description=__doc__)
    parser.add_argument("file", type=str, help="An experiment: configs/experiments/NAME.yaml")
    parser.add_argument("--scale", type=str, default="tiny", help="tiny, paper, or another that the file has")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="A key for every run")
    parser.add_argument("--dry-run", action="store_true", help="Print one command line for each run that is to do")
    parser.add_argument("--jobs", type=int, default=1, help="Runs at a time")
    parser.add_argument("--runs", type=str, default="runs/experiments", help="Folder of the runs")
    parser.add_argument("--out", type=str | None, help="Folder of the comparison. null: beside the runs")
    try:
        args = parser.parse_args(argv)
    except ArgumentError as error:
        raise UserError(" ".join(str(error).split())) from None
    changes = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set: expected KEY=VALUE, such as model.name=FOLDER, got {text!r}")
        changes[key] = value
    experiment = read_experiment(Path(args.file))
    runs = Path(args.runs).resolve()
    planned = plan(experiment, args.scale, changes, runs)
    states = [item.state() for item in planned]
    missing = [item for item, state in zip(planned, states, strict=True) if state != "finished"]
    scale = experiment.scales[args.scale]
    hours = sum(item.minutes for item in missing) / 60
    summary = (
        f"{experiment.title}, {args.scale}: {len(planned)} runs, {len(planned) - len(missing)} finished, "
        f"{states.count('begun')} to resume. To do: about {hours:.1f} hours, one at a time, on {scale.hardware}."
    )
    if args.dry_run:
        print(f"# {summary}")
        for item in missing:
            print(shlex.join(["python", *(_relative(part) for part in item.command[1:])]))
        return
    print(summary, flush=True)
    failed = run_all(missing, args.jobs, max(1, (os.cpu_count() or 1) // args.jobs))
    begun = [item for item in planned if (item.folder / "config.yaml").exists()]
    if not begun:
        raise UserError(f"no run was begun; the first one's output is in {planned[0].folder}.log")
    groups = group([read(item.folder) for item in begun], experiment.over, [item.label for item in begun])
    name = Path(args.file).stem
    out = Path(args.out) if args.out else runs / args.scale / f"{name}-comparison"
    command = f"python -m study.experiment configs/experiments/{Path(args.file).name} --scale {args.scale}"
    command += "".join(f" --set {key}={'FOLDER' if '/' in value else value}" for key, value in changes.items())
    written = write(Comparison(groups, experiment.baseline, experiment.over), out, experiment.title,
                    experiment.question, command)  # fmt: skip
    print(f"Written to {written}")
    if scale.evaluate and not failed:
        evaluate(scale.evaluate, planned, runs / args.scale / f"{name}-evaluation", out)
    if failed:
        raise UserError(f"{len(failed)} runs failed; the same command resumes them")


def _relative(part: str) -> str:
    return str(Path(part).relative_to(ROOT)) if part.startswith(f"{ROOT}/") else part


if __name__ == "__main__":
    main(command_line)
