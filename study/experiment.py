"""Runs an experiment: every method, value and seed that its file names, evaluates each run, and compares them.

    python -m study.experiment configs/experiments/imdb_curves.yaml                             # the toy setting
    python -m study.experiment configs/experiments/imdb_curves.yaml --scale paper --dry-run     # one command line a run
    python -m study.experiment FILE --jobs 2 --out results/NAME
    python -m study.experiment FILE --engine ray --address auto --gpus 1                        # on a Ray cluster

Runs are made seed by seed. When a run ends it is evaluated, its row is written into the CSV files of --out, and its
checkpoints are removed. A run is known by experiment, group and seed: one with a row is not made again, also on another
machine, and interrupted ones are resumed.
"""

import argparse
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cory.command import Arguments, main
from cory.errors import UserError, expect, one_of
from cory.identity import is_local, versions
from cory.plural import counted
from cory.run.folder import locked
from cory.run.settings import differences
from cory.run.signals import HANGUP
from study import local_engine, ray_engine
from study.compare import check_out, write
from study.experiment_file import Experiment, read_experiment
from study.plan import plan
from study.planned import Planned
from study.records import read, short_version
from study.results import Results
from study.run_evaluation import RunEvaluation
from study.scripts import ROOT

if TYPE_CHECKING:
    import pandas as pd

ENGINES = ("local", "ray")


@dataclass(frozen=True)
class Engine:
    """Where runs run: `jobs` at a time on this machine, or as Ray tasks, each with so many CPUs and GPUs.

    `cpus` is a run's number of threads, too; None: those of this process, shared between the jobs.
    """

    name: str = "local"
    jobs: int = 1
    cpus: int | None = None
    gpus: float = 0.0
    address: str | None = None

    def __post_init__(self) -> None:
        one_of("--engine", ENGINES, self.name)

    @property
    def threads(self) -> int:
        """Of each run."""
        return self.cpus or max(1, (os.cpu_count() or 1) // self.jobs)


EVALUATION_FAILED = "its evaluation failed"
INTERRUPTS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if HANGUP else [])]
# Statuses of runs; the latter before they load.
STOPPED = [*(128 + s for s in INTERRUPTS), *(-s for s in INTERRUPTS)]


def run_all(
    planned: Sequence[Planned],
    engine: Engine,
    after: Callable[[Planned, float], str | None] | None = None,
) -> dict[Path, str]:
    """Runs the planned runs, each with its output in FOLDER.log.

    Args:
        after: is called with each run that has ended well and its seconds, one call at a time; it returns what to add
            to the line that tells of the run, and raises a UserError if the run counts as failed.

    Returns:
        why some did not end well, by the runs' folders.
    """
    _make_missing_models(planned)
    failed: dict[Path, str] = {}
    logged = {item.folder: _size(_log(item)) for item in planned}
    count = 0
    one_at_a_time = threading.Lock()
    threads = engine.threads

    def ended(item: Planned, status: int | str, seconds: float) -> None:
        nonlocal count
        with one_at_a_time:
            outcome = f"{seconds:.0f} s"
            if status in STOPPED:
                outcome = "stopped; the same command continues"
                failed[item.folder] = "stopped"
            elif status:
                error = _error(_log(item), logged[item.folder])
                outcome = f"FAILED ({status}){error}, see {_log(item)}"
                failed[item.folder] = f"failed ({status}){error}"
            elif after:
                try:
                    outcome += after(item, seconds) or ""
                except UserError as of_evaluation:
                    outcome = f"FAILED ({of_evaluation})"
                    failed[item.folder] = EVALUATION_FAILED
            count += 1
            print(f"[{count}/{len(planned)}] {item.folder.name}: {outcome}", flush=True)

    if engine.name == "ray" and planned:
        ray_engine.run_all(planned, engine.jobs, threads, engine.gpus, engine.address, ended)
    else:
        is_shared = engine.cpus is not None or engine.jobs > 1
        local_engine.run_all(planned, engine.jobs, threads if is_shared else None, ended)
    return failed


def _make_missing_models(planned: Sequence[Planned]) -> None:
    """Trains the larger policy of the toy setting, once, if a run names it."""
    if any(item.settings["model"]["name"] == "tiny_large" for item in planned):
        print(
            "The larger policy of the toy setting is not shipped. Training it once; this takes a minute.",
            flush=True,
        )
        command = [sys.executable, "imdb_train/make_weights.py", "tiny_large"]
        subprocess.run(command, cwd=ROOT, check=True)


def _log(item: Planned) -> Path:
    """Of a run and its evaluation; each start adds to it."""
    return Path(f"{item.folder}.log")


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _error(log: Path, start: int) -> str:
    """The last error in a log, from a byte on; nothing if there is none, or no log, as where Ray has lost a worker."""
    if not log.exists():
        return ""
    said = log.read_bytes()[start:].decode(errors="replace")
    errors = re.findall(r"^error: (.*)", said, re.MULTILINE)
    return f": {errors[-1]}" if errors else ""


def finish(
    item: Planned, results: Results, seconds: float | None, discard_agents: bool = False
) -> None:
    """Evaluates a run that has ended, writes its rows, and removes its checkpoints.

    Raises:
        UserError: the evaluation failed; the checkpoints stay.
    """
    results.add_run(item, seconds, megabytes(item.folder))
    shutil.rmtree(item.folder / "checkpoints", ignore_errors=True)
    evaluation = results.evaluation
    if discard_agents and evaluation and not evaluation.needs_agents_of(item):
        for agent in item.folder.glob("agent_*"):
            shutil.rmtree(agent)
        evaluation.forget(item)


def megabytes(folder: Path) -> float:
    """The size of a folder's files, without checkpoints, which are removed."""
    files = [
        file
        for file in folder.rglob("*")
        if file.is_file() and "checkpoints" not in file.relative_to(folder).parts
    ]
    return round(sum(file.stat().st_size for file in files) / 1e6, 3)


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.experiment`: see the module."""
    args = _arguments(argv)
    changes = _changes(args.set)
    experiment = read_experiment(Path(args.file))
    scale = args.scale or ("tiny" if "tiny" in experiment.scales else next(iter(experiment.scales)))
    engine = Engine(args.engine, args.jobs, args.cpus, args.gpus, args.address)
    runs = Path(args.runs).resolve()
    planned = plan(experiment, scale, changes, runs)
    evaluation = experiment.scales[scale].evaluate or ""
    if args.discard_agents and not evaluation:
        raise UserError(
            "--discard-agents: expected a scale with `evaluate`, as agents are removed once they are evaluated, got "
            f"{scale!r} of {args.file}, which has none"
        )
    home = runs / scale / experiment.name
    out = Path(args.out) if args.out else home / "comparison"
    threads = None if args.dry_run else _threads(engine)
    results = Results(
        out=out,
        experiment=experiment.name,
        scale=scale,
        planned=planned,
        baseline=experiment.baseline or _first_single(planned),
        evaluation=(
            RunEvaluation(evaluation, home / "evaluation", threads) if evaluation else None
        ),
        threads=threads,
        set_for_all=[
            *experiment.scales[scale].flags,
            *(key for key, value in changes.items() if not _is_of_this_machine(value)),
        ],
        sources={
            name: out.parent / name if args.out else runs / scale / name / "comparison"
            for name in {item.source for item in planned if item.source}
        },
    )
    # Seed by seed, so that all groups have the same seeds whenever the experiment is stopped.
    seeds = experiment.scales[scale].seeds[: args.seeds]
    left = sorted(
        [item for item in planned if item.folder not in results.recorded and item.seed in seeds],
        key=lambda item: item.seed,
    )
    states = {item.folder: item.state() for item in left}
    missing = [item for item in left if states[item.folder] != "finished"]
    to_evaluate = [item for item in left if states[item.folder] == "finished"]
    if evaluation:
        for item in to_evaluate:
            item.check_agents()
    begun = {folder for folder, state in states.items() if state == "begun"}
    summary = (
        f"{experiment.title}, {scale}: {counted(len(planned), 'run')}, {len(results.recorded)} with a row, "
        f"{len(to_evaluate)} finished, {len(begun)} to resume. "
        f"To do: {_cost(missing, results, experiment, engine.jobs)}."
    )
    if args.dry_run:
        print(f"# {summary}")
        for item in missing:
            print(_shown_command(item))
        return
    print(summary, flush=True)
    if missing:
        print(_disk(missing, results, runs), flush=True)
    for note in _other_versions(results):
        print(note, flush=True)
    check_out(out)

    with _alone("--runs", home), _alone("--out", out):
        results.check_rows()
        results.take_rows()
        failed = _evaluate(to_evaluate, results, args.discard_agents)
        failed |= _make(missing, begun, results, engine, args.discard_agents)
        written = _write(results, experiment, _repeated(args.file, scale, changes), failed)
        print(f"Written to {written}")
    if failed:
        raise UserError(f"{counted(len(failed), 'run')} failed; the same command resumes")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("file", help="An experiment: configs/experiments/NAME.yaml")
    parser.add_argument(
        "--scale", help="One of the file's scales. Default: tiny, or else the first"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="For all runs; none varies it",
    )
    parser.add_argument(
        "--seeds", type=int, help="Only the first so many of the file's seeds. Default: all"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="Only print the command line of each unfinished run"
    )
    parser.add_argument("--jobs", type=int, default=1, help="Runs at a time on this machine")
    parser.add_argument(
        "--engine", choices=["local", "ray"], default="local", help="What starts the runs"
    )
    parser.add_argument(
        "--address",
        help="Ray cluster, such as auto. Default: a new one on this machine",
    )
    parser.add_argument(
        "--cpus", type=int, help="Threads of a run. Default: the machine's cores over --jobs"
    )
    parser.add_argument(
        "--gpus", type=float, default=0.0, help="GPUs of a run, with Ray; 0.5: two runs on one"
    )
    parser.add_argument("--runs", default="runs/experiments", help="Folder of the runs")
    parser.add_argument("--out", help="Folder of the results. Default: beside the runs")
    parser.add_argument(
        "--discard-agents",
        action="store_true",
        help="Remove the agents and held-out responses of each run but the first once it is evaluated",
    )
    args = parser.parse_args(argv)
    expect(args.seeds is None or args.seeds >= 1, "--seeds", "at least 1", args.seeds)
    expect(args.jobs >= 1, "--jobs", "at least 1", args.jobs)
    expect(args.cpus is None or args.cpus >= 1, "--cpus", "at least 1", args.cpus)
    expect(args.gpus >= 0, "--gpus", "at least 0", args.gpus)
    expect(
        args.engine == "ray" or not (args.address or args.gpus),
        "--engine",
        "ray with --address or --gpus",
        "local",
    )
    return args


def _changes(texts: Sequence[str]) -> dict[str, str]:
    """The values of --set, by their keys."""
    changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set: expected KEY=VALUE, such as model.name=FOLDER, got {text!r}")
        changes[key] = value
    return changes


def _shown_command(item: Planned) -> str:
    """The command of a run, with paths from the repository's root where it runs there."""
    arguments = [_relative(part) if item.cwd else part for part in item.command[1:]]
    return shlex.join(["python", *arguments])


def _evaluate(
    finished: Sequence[Planned], results: Results, discard_agents: bool
) -> dict[Path, str]:
    """Evaluates runs that had finished before. Returns why some failed, by their folders."""
    failed = {}
    for item in finished:
        try:
            finish(item, results, None, discard_agents)
        except UserError as error:
            print(f"{item.folder.name}: FAILED ({error})", flush=True)
            failed[item.folder] = EVALUATION_FAILED
    return failed


def _make(
    missing: Sequence[Planned],
    begun: Container[Path],
    results: Results,
    engine: Engine,
    discard_agents: bool,
) -> dict[Path, str]:
    """Makes runs and evaluates each. Returns why some did not end well, by their folders.

    `begun` has the folders of runs that are resumed, whose seconds are not those of a whole run.
    """
    left = list(missing)

    def after(item: Planned, seconds: float) -> str:
        finish(item, results, None if item.folder in begun else seconds, discard_agents)
        left.remove(item)
        seconds_left = results.estimate(left)[0] / engine.jobs
        if math.isnan(seconds_left) or not left:
            return ""
        return f"; about {_duration(seconds_left)} left"

    return run_all(missing, engine, after)


def _write(
    results: Results, experiment: Experiment, command: str, failed: Mapping[Path, str]
) -> Path:
    """Writes tables and figures of the runs that have ended, and which have not. Returns the page.

    Raises:
        UserError: none has.
    """
    study = results.study()
    if study is None:
        raise UserError(
            f"no run has ended well; the output of the first one is in {results.planned[0].folder}.log"
        )
    in_study = set(study.runs["run"])  # a run of a later seed may have ended earlier
    for item in results.planned:
        if item.folder.name not in in_study or not (item.folder / "summary.json").exists():
            continue
        record = read(item.folder)
        # The row may have been made elsewhere, and the folder hold a run of other settings.
        if not differences(record.settings, item.settings):
            study.records.append(record)
    missing = _missing_runs(results.planned, study.runs)
    missing += [
        f"{item.of.name}, seed {item.seed}: {failed[item.folder]}"
        for item in results.planned
        if item.folder in failed
    ]
    return write(
        study, results.out, experiment.title, experiment.question, command, missing=missing
    )


def _missing_runs(planned: Sequence[Planned], runs: "pd.DataFrame") -> list[str]:
    """What a page says of the planned runs that have no row: a line for all groups if they lack the same seeds."""
    ended = set(zip(runs["group"], runs["seed"], strict=True))
    seeds: dict[str, list[int]] = {item.of.name: [] for item in planned}
    for item in planned:
        if (item.of.name, item.seed) not in ended:
            seeds[item.of.name].append(item.seed)
    missing = {name: ", ".join(map(str, sorted(of_group))) for name, of_group in seeds.items()}
    if not any(missing.values()):
        return []
    if len(set(missing.values())) == 1:
        return [f"planned seeds that no group has ended: {missing.popitem()[1]}"]
    return [
        f"{name}: planned seeds that have not ended: {of_group}"
        for name, of_group in missing.items()
        if of_group
    ]


def _threads(engine: Engine) -> int | None:
    """The threads of each run that is made on this machine; None on a cluster, whose machines may differ."""
    if engine.name == "ray":
        return None
    if engine.cpus is not None or engine.jobs > 1:
        return engine.threads
    import torch  # here, as importing it takes seconds

    return torch.get_num_threads()  # of a run, which inherits the environment


def _first_single(planned: Sequence[Planned]) -> str:
    """The name of the first runs of one agent, or the first at all."""
    from study.groups import single

    return next((item for item in planned if single(item.settings)), planned[0]).label


def _cost(missing: Sequence[Planned], results: Results, experiment: Experiment, jobs: int) -> str:
    """What is left to do, in hours, and how it is known."""
    if not missing:
        return "nothing"
    seconds, by_rows = results.estimate(missing)
    if math.isnan(seconds):
        return f"{counted(len(missing), 'run')}; how long is not known before the first of each kind has ended"
    sources = []
    if by_rows:
        sources.append(f"{counted(by_rows, 'run')} as long as earlier ones of the kind")
    if by_rows < len(missing):
        sources.append(
            f"{len(missing) - by_rows} by the file, on {experiment.scales[results.scale].hardware}"
        )
    return f"about {_duration(seconds / jobs)}, {jobs} at a time ({'; '.join(sources)})"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return counted(round(seconds), "second")
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _disk(missing: Sequence[Planned], results: Results, runs: Path) -> str:
    """The disk that runs will take, and what is free."""
    existing = next(folder for folder in (runs, *runs.parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 1e9
    taken = results.disk(missing) / 1e3
    if math.isnan(taken):
        needed = "what the runs take is known once the first of each kind has ended"
    else:
        needed = f"{taken:.2f} GB, and the checkpoints of the runs that train at the time"
    return f"Disk: {needed}; {free:.0f} GB are free."


def _other_versions(results: Results) -> list[str]:
    """A line for each other version of the code that made some of the rows."""
    current = versions().get("commit", "unknown")
    made_by = [row.version for row in results.recorded.values() if row.version != current]
    return [
        f"{counted(made_by.count(version), 'row')} of version {short_version(version)}, not of this one, "
        f"{short_version(current)}: kept"
        for version in dict.fromkeys(made_by)
    ]


@contextmanager
def _alone(flag: str, folder: Path) -> Iterator[None]:
    """Keeps another process from the folder that a flag names, which is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{flag}: expected a folder that can be written, got {str(folder)!r} ({error})"
        ) from None
    with locked(folder):
        yield


def _repeated(file: str, scale: str, changes: Mapping[str, str]) -> str:
    """The command that repeats an experiment, without the folders of this machine."""
    absolute = Path(file).resolve()
    shown = str(absolute.relative_to(ROOT)) if absolute.is_relative_to(ROOT) else file
    command = f"python -m study.experiment {shlex.quote(shown)} --scale {scale}"
    for key, value in changes.items():
        shown_value = "FOLDER" if _is_of_this_machine(value) else value
        command += f" --set {shlex.quote(f'{key}={shown_value}')}"
    return command


def _is_of_this_machine(value: str) -> bool:
    """Whether a value of --set names a file or folder that other machines may not have."""
    return is_local(value) or ("/" in value and os.path.exists(value))


def _relative(part: str) -> str:
    return str(Path(part).relative_to(ROOT)) if part.startswith(f"{ROOT}/") else part


if __name__ == "__main__":
    main(command_line)
