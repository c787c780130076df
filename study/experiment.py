"""Runs an experiment: every method, value and seed that its file names, then compares them.

    python -m study.experiment configs/experiments/imdb_curves.yaml                             # the toy setting
    python -m study.experiment configs/experiments/imdb_curves.yaml --scale paper --dry-run     # one command line a run
    python -m study.experiment FILE --jobs 2 --out results/imdb_curves
    python -m study.experiment FILE --engine ray --address auto --gpus 1                        # on a Ray cluster

Runs that are finished are skipped, interrupted ones resumed. Experiments share runs: a run's folder is named by its
configuration, what is changed in it, and its seed.
"""

import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from cory.cli import terminal
from cory.cli.arguments import Arguments
from cory.cli.main import main
from cory.errors import UserError, expect, one_of
from cory.evaluation.folder import extends
from cory.provenance.models import is_local
from cory.run.output import locked, replace_text, replacing
from study import ray_engine
from study.compare import check_out, write
from study.comparison import Comparison
from study.groups import group
from study.plan import ROOT, Planned, is_module, plan, read_experiment, start
from study.records import read
from study.report import write_report

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


INTERRUPTS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if terminal.HANGUP else [])]
STOPPED = [*(128 + s for s in INTERRUPTS), *(-s for s in INTERRUPTS)]  # statuses of runs; the latter before they load


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP. The runs may not get it by themselves, as they get a Ctrl-C of the terminal."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__()


def _terminated(number: int, frame: FrameType | None) -> None:
    if number == terminal.HANGUP:
        signal.signal(number, signal.SIG_IGN)  # a terminal that closes may send it twice
        terminal.outlive()
    raise Terminated(number)


def run_all(planned: Sequence[Planned], engine: Engine) -> list[Planned]:
    """Runs the planned runs, each with its output in FOLDER.log.

    Returns:
        those that failed.
    """
    if any(item.settings["model"]["name"] == "tiny_large" for item in planned):
        print("The larger policy of the toy setting is not shipped. Training it once; this takes a minute.", flush=True)
        subprocess.run([sys.executable, "imdb_train/make_weights.py", "tiny_large"], cwd=ROOT, check=True)
    failed = []
    count = [0]
    threads = engine.cpus or max(1, (os.cpu_count() or 1) // engine.jobs)

    def ended(item: Planned, status: int | str, seconds: float) -> None:
        count[0] += 1
        how = f"{seconds:.0f} s" if not status else f"FAILED ({status}), see {item.folder}.log"
        if status in STOPPED:
            how = "stopped; the same command continues"
        print(f"[{count[0]}/{len(planned)}] {item.folder.name}: {how}", flush=True)
        if status:
            failed.append(item)

    running: set[subprocess.Popen[bytes]] = set()

    def run(item: Planned) -> None:
        started = time.perf_counter()
        item.folder.parent.mkdir(parents=True, exist_ok=True)
        env = os.environ | ({"OMP_NUM_THREADS": str(threads)} if engine.cpus or engine.jobs > 1 else {})
        with open(f"{item.folder}.log", "a", encoding="utf-8") as log:
            process = subprocess.Popen(item.command, cwd=item.cwd, stdout=log, stderr=subprocess.STDOUT, env=env,
                                       preexec_fn=ray_engine.die_with_parent)  # fmt: skip
            running.add(process)
            status = process.wait()
            running.remove(process)
        ended(item, status, time.perf_counter() - started)

    if engine.name == "ray" and planned:
        ray_engine.run_all(planned, engine.jobs, threads, engine.gpus, engine.address, ended)
        return failed
    numbers: list[int] = [signal.SIGTERM]
    if terminal.heeds_hangup():
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, _terminated) for number in numbers}
    with ThreadPoolExecutor(engine.jobs) as pool:
        try:
            list(pool.map(run, planned))
        except KeyboardInterrupt as stop:
            print("Stopping: each run finishes its iteration and is saved.", flush=True)
            if isinstance(stop, Terminated):
                for process in list(running):
                    process.send_signal(stop.number)
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return failed


def evaluate(command: str, planned: Sequence[Planned], folder: Path, out: Path) -> None:
    """Evaluates all runs with a script of their task into `folder`, unless done; copies table and figure to `out`.

    Raises:
        UserError: the script failed.
    """
    runs, before = [str(item.folder) for item in planned], folder / "settings.json"
    then = json.loads(before.read_text(encoding="utf-8")) if before.exists() else {}
    if "trained" in then and not extends(runs, then):
        older = next(path for n in itertools.count(1) if not (path := Path(f"{folder}-older-{n}")).exists())
        folder.rename(older)
        print(f"The runs have changed since they were evaluated. The old evaluation is now in {older}")
    asked, whole = folder / "command.txt", "\n".join([command, *runs])  # stands there when it has ended
    if asked.exists() and asked.read_text(encoding="utf-8") == whole:
        print(f"Already evaluated: {folder}")
    else:
        asked.unlink(missing_ok=True)
        script, *options = shlex.split(command)
        cwd = None if is_module(script) else ROOT
        done = subprocess.run([*start(script), *runs, *options, "--output", str(folder)], cwd=cwd,
                              preexec_fn=ray_engine.die_with_parent)  # fmt: skip
        if done.returncode:
            raise UserError(f"{command}: failed with status {done.returncode}")
        replace_text(asked, whole)
        if is_module(script):
            write_report(folder)
    for file in [*folder.glob("evaluation.*"), *folder.glob("*.png")]:
        with replacing(out / file.name) as partial:
            shutil.copyfile(file, partial)


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.experiment`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("file", type=str, help="An experiment: configs/experiments/NAME.yaml")
    parser.add_argument("--scale", type=str | None, help="One of the file's scales. null: tiny, or else the first")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="For all runs; none varies it")
    parser.add_argument("--dry-run", action="store_true", help="Only print the command line of each unfinished run")
    parser.add_argument("--jobs", type=int, default=1, help="Runs at a time on this machine")
    parser.add_argument("--engine", type=Literal["local", "ray"], default="local", help="What starts the runs")
    parser.add_argument("--address", type=str | None, help="Ray cluster, such as auto. null: a new one on this machine")
    parser.add_argument("--cpus", type=int | None, help="Threads of a run. null: the machine's cores over --jobs")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs of a run, with Ray; 0.5: two runs on one")
    parser.add_argument("--runs", type=str, default="runs/experiments", help="Folder of the runs")
    parser.add_argument("--out", type=str | None, help="Folder of the comparison. null: beside the runs")
    args = parser.of(argv)
    expect(args.jobs >= 1, "--jobs", "at least 1", args.jobs)
    expect(args.cpus is None or args.cpus >= 1, "--cpus", "at least 1", args.cpus)
    expect(args.gpus >= 0, "--gpus", "at least 0", args.gpus)
    expect(args.engine == "ray" or not (args.address or args.gpus), "--engine", "ray with --address or --gpus", "local")
    changes = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set: expected KEY=VALUE, such as model.name=FOLDER, got {text!r}")
        changes[key] = value
    experiment = read_experiment(Path(args.file))
    args.scale = args.scale or ("tiny" if "tiny" in experiment.scales else next(iter(experiment.scales)))
    runs = Path(args.runs).resolve()
    planned = plan(experiment, args.scale, changes, runs)
    states = [item.state() for item in planned]
    missing = [item for item, state in zip(planned, states, strict=True) if state != "finished"]
    scale = experiment.scales[args.scale]
    hours = sum(item.minutes for item in missing) / 60
    cost = f"about {hours:.1f} hours, one at a time, on {scale.hardware}" if scale.minutes else f"{len(missing)} runs"
    summary = (
        f"{experiment.title}, {args.scale}: {len(planned)} runs, {len(planned) - len(missing)} finished, "
        f"{states.count('begun')} to resume. To do: {cost}."
    )
    if args.dry_run:
        print(f"# {summary}")
        for item in missing:
            print(shlex.join(["python", *(_relative(part) if item.cwd else part for part in item.command[1:])]))
        return
    print(summary, flush=True)
    name = Path(args.file).stem
    out = Path(args.out) if args.out else runs / args.scale / f"{name}-comparison"
    check_out(out)
    with _alone(runs / args.scale, name):
        failed = run_all(missing, Engine(args.engine, args.jobs, args.cpus, args.gpus, args.address))
        begun = [item for item in planned if (item.folder / "metrics.jsonl").exists()]
        if not begun:
            raise UserError(f"no run was started; the output of the first one is in {planned[0].folder}.log")
        groups = group([read(item.folder) for item in begun], experiment.over, [item.label for item in begun])
        comparison = Comparison(groups, experiment.baseline, experiment.over)
        command = _repeated(args.file, args.scale, changes)
        written = write(comparison, out, experiment.title, experiment.question, command)
        print(f"Written to {written}")
        if scale.evaluate and not failed:
            evaluate(scale.evaluate, planned, runs / args.scale / f"{name}-evaluation", out)
    if failed:
        raise UserError(f"{len(failed)} runs failed; the same command resumes them")


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Keeps another process from running the same experiment into the same folder, which is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--runs: expected a folder that can be written, got {str(folder)!r} ({error})") from None
    with locked(folder, f".{name}.lock"):
        yield


def _repeated(file: str, scale: str, changes: Mapping[str, str]) -> str:
    """The command that repeats an experiment, without the folders of this machine."""
    path = Path(file)
    shipped = (ROOT / "configs/experiments" / path.name).resolve() == path.resolve()
    shown = f"configs/experiments/{path.name}" if shipped else file
    command = f"python -m study.experiment {shown} --scale {scale}"
    for key, value in changes.items():
        local = is_local(value) or ("/" in value and Path(value).exists())
        command += f" --set {shlex.quote(f'{key}=FOLDER' if local else f'{key}={value}')}"
    return command


def _relative(part: str) -> str:
    return str(Path(part).relative_to(ROOT)) if part.startswith(f"{ROOT}/") else part


if __name__ == "__main__":
    main(command_line)
