"""Runs an experiment: trains every method, value of the varied key and seed, evaluates the runs and compares them.

    python -m study.experiment configs/experiments/imdb_curves.yaml                             # the toy setting
    python -m study.experiment configs/experiments/imdb_curves.yaml --scale paper --dry-run     # prints the commands
    python -m study.experiment FILE --jobs 2 --out results/NAME
    python -m study.experiment FILE --engine ray --address auto --gpus 1                        # on a Ray cluster

Runs are trained seed by seed. When a run ends, it is evaluated, its row is written to the CSV files in --out, and its
checkpoints are removed. A run is identified by experiment, group and seed. A run that has a row is not trained again,
not even on another machine. To continue interrupted runs, repeat the command.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from cory.command import Arguments, main
from cory.errors import UserError, counted
from cory.run.folder import locked
from study import engines, first_run
from study.compare import verdicts, write_page
from study.experiment_file import read_experiment
from study.frame import make_folder
from study.plan import ROOT, Planned, checkout_file, is_local_path, plan
from study.results import Results
from study.run_evaluation import RunEvaluation

# Exit statuses of a run that a signal ended. They are negative if the run did not handle signals yet.
STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM}


def command_line(argv: Sequence[str] | None = None) -> None:
    """Runs `python -m study.experiment`; see the module's docstring."""
    args = _arguments(argv)
    experiment = read_experiment(Path(args.file))
    scale = args.scale or ("tiny" if "tiny" in experiment.scales else next(iter(experiment.scales)))
    changes = _changes(args.set)
    runs = Path(args.runs).resolve()
    planned = plan(experiment, scale, changes, runs)
    settings = experiment.scales[scale]
    home = runs / scale / experiment.name
    out = Path(args.out) if args.out else home / "comparison"

    threads = _threads(args)
    evaluation = None
    if settings.evaluate:
        evaluation = RunEvaluation(settings.evaluate, home / "evaluation", threads)
    elif args.discard_agents:
        raise UserError(
            f"--discard-agents: expected a scale with `evaluate`, got {scale}. Agents are removed after evaluation"
        )
    results = Results(out, experiment, scale, changes, planned, evaluation)

    # Runs are made seed by seed, so that groups share seeds even if the experiment is stopped.
    seeds = settings.seeds[: args.seeds]
    missing = [item for item in planned if item.seed in seeds and not results.has(item)]
    missing.sort(key=lambda item: item.seed)
    if args.engine == "ray" and any(item.starts_from for item in missing):
        raise UserError(
            "--engine: expected local, got ray. Some runs start from other runs of the experiment"
        )
    print(
        f"# {experiment.title}, {scale}: {counted(len(planned), 'run')}, {len(missing)} to make or to continue",
        flush=True,
    )
    if args.dry_run:
        for item in missing:
            print(_command_text(item))
        return

    make_folder("--out", out)
    make_folder("--runs", home)
    with locked(out):
        results.write()
        failed = _make(missing, results, args, threads)
        _report(results, _repeat_command(args.file, scale, changes))
    if failed:
        raise UserError(
            f"{counted(len(failed), 'run')} failed or stopped. Repeat the command to continue"
        )


def _report(results: Results, command: str) -> None:
    """Writes the page that compares the runs and prints its verdicts. Raises a UserError if no run has finished."""
    experiment = results.experiment
    if results.study is None:
        raise UserError(
            f"expected at least one finished run, got none. The first run's output is in {results.planned[0].log}"
        )
    notes = [
        f"planned, but not finished: {item.folder.name}"
        for item in results.planned
        if not results.has(item)
    ]
    page = write_page(
        results.study, results.out, experiment.title, experiment.question, command, notes=notes
    )
    print("\n".join([*verdicts(results.study), f"Written to {page}"]))


def _make(
    missing: Sequence[Planned], results: Results, args: argparse.Namespace, threads: int | None
) -> list[Planned]:
    """Trains or continues runs and evaluates each when it ends. Returns the runs that failed or were stopped."""
    _make_missing_models(missing)
    failed: list[Planned] = []
    count = 0
    one_at_a_time = threading.Lock()

    def ended(item: Planned, status: int | str, seconds: float) -> None:
        nonlocal count
        with one_at_a_time:
            outcome = f"{seconds:.0f} s"
            if status in STOPPED:
                outcome = "stopped; repeat the command to continue"
            elif status:
                outcome = f"FAILED ({status}), see {item.log}"
            else:
                try:
                    _finish(item, results, args)
                except UserError as error:
                    status = outcome = f"FAILED ({error})"
            if status:
                failed.append(item)
            count += 1
            print(f"[{count}/{len(missing)}] {item.folder.name}: {outcome}", flush=True)

    if args.engine == "ray" and missing:
        engines.run_on_ray(missing, args.jobs, threads or 1, args.gpus, args.address, ended)
    else:
        engines.run_here(missing, args.jobs, threads, ended)
    return failed


def _finish(item: Planned, results: Results, args: argparse.Namespace) -> None:
    """Evaluates a run that has ended, writes its rows and removes its checkpoints.

    The first records of the first run in --out are kept for later checks (`study/first_run.py`), except on a cluster,
    whose machines may differ.

    Raises:
        UserError: the evaluation failed; the checkpoints are kept.
    """
    results.add_run(item)
    if args.engine == "local" and not (results.out / first_run.FIRST_RUN).exists():
        first_run.keep(item.folder, results.out, _threads(args) or first_run.default_threads())
    shutil.rmtree(item.folder / "checkpoints", ignore_errors=True)
    evaluation = results.evaluation
    is_start = any(
        item.folder in folder.parents for other in results.planned for folder in other.starts_from
    )
    if args.discard_agents and evaluation and evaluation.first() != item.folder and not is_start:
        for agent in item.folder.glob("agent_*"):
            shutil.rmtree(agent)


def _make_missing_models(planned: Sequence[Planned]) -> None:
    """Trains the toy setting's larger policy, which is not shipped, if a run uses it.

    Raises:
        UserError: the script that trains it, toys/make_imdb_toy.py of a checkout, is missing.
    """
    if any(item.settings["model"]["name"] == "tiny_large" for item in planned):
        checkout_file("toys/make_imdb_toy.py", "model.name tiny_large")
        command = [sys.executable, "-m", "toys.make_imdb_toy", "tiny_large"]
        subprocess.run(command, cwd=ROOT, check=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("file", help="An experiment: configs/experiments/NAME.yaml")
    parser.add_argument(
        "--scale", help="One of the file's scales. Default: tiny if present, otherwise the first"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="A setting for all runs; the experiment must not vary it",
    )
    parser.add_argument(
        "--seeds", type=int, help="Use only the first SEEDS seeds of the file. Default: all"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="Only print the commands of the runs that have no row yet",
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
        "--cpus", type=int, help="Threads per run. Default: the machine's cores divided by --jobs"
    )
    parser.add_argument(
        "--gpus", type=float, default=0.0, help="GPUs per run, with Ray; 0.5: two runs share one"
    )
    parser.add_argument("--runs", default="runs/experiments", help="Folder of the runs")
    parser.add_argument("--out", help="Folder of the results. Default: beside the runs")
    parser.add_argument(
        "--discard-agents",
        action="store_true",
        help="Remove a run's agents after its evaluation. The first run keeps its agents, and so does a run from which "
        "other runs start",
    )
    args = parser.parse_args(argv)
    for key in ("seeds", "jobs", "cpus"):
        number = getattr(args, key)
        if number is not None and number < 1:
            raise UserError(f"--{key}: expected at least 1, got {number}")
    if args.engine == "local" and (args.address or args.gpus):
        raise UserError("--engine: expected ray with --address or --gpus, got local")
    return args


def _threads(args: argparse.Namespace) -> int | None:
    """Returns the number of threads per run. None: the run has the machine to itself and decides."""
    if args.cpus is None and args.jobs == 1 and args.engine == "local":
        return None
    return args.cpus or max(1, (os.cpu_count() or 1) // args.jobs)


def _changes(texts: Sequence[str]) -> dict[str, str]:
    """Returns the values of --set by key."""
    changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set: expected KEY=VALUE, such as model.name=FOLDER, got {text!r}")
        changes[key] = value
    return changes


def _command_text(item: Planned) -> str:
    """Returns a run's command; if its working directory is the repository's root, paths are relative to the root."""
    arguments = item.command[1:]
    if item.cwd:
        arguments = [part.removeprefix(f"{ROOT}/") for part in arguments]
    return shlex.join(["python", *arguments])


def _repeat_command(file: str, scale: str, changes: dict[str, str]) -> str:
    """Returns the command that repeats an experiment, without this machine's folders."""
    absolute = Path(file).resolve()
    is_shipped = Path(file).is_absolute() and absolute.is_relative_to(ROOT)
    shown = str(absolute.relative_to(ROOT)) if is_shipped else file
    command = f"python -m study.experiment {shlex.quote(shown)} --scale {scale}"
    for key, value in changes.items():
        shown_value = "FOLDER" if is_local_path(value) else value
        command += f" --set {shlex.quote(f'{key}={shown_value}')}"
    return command


if __name__ == "__main__":
    main(command_line)
