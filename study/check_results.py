"""Repeats the beginning of the first run of each folder of results: does the current code still give these numbers?

    python -m study.check_results                             # every folder under results/ that keeps its first run
    python -m study.check_results results/NAME --set model.name=FOLDER     # where a run needs local folders

`study.experiment` keeps the first run that it makes for a folder: its settings, where it ran, and its first three
records of metrics.jsonl. On the same kind of processor, with the same libraries and threads, they must come out
exactly; elsewhere the task reward of the first record within 0.05. Ends with an error if they do not.
"""

import json
import math
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory.callbacks.callback import Callback
from cory.cli.arguments import Arguments
from cory.cli.load import BESIDE_SETTINGS, as_config
from cory.cli.main import main
from cory.errors import UserError
from cory.provenance.versions import versions
from cory.run.output import replace_text
from cory.run.record import read_settings
from cory.tasks.kind import find_kind
from study.planned import FIRST_RUN
from study.records import flat
from study.scripts import ROOT

if TYPE_CHECKING:
    from cory.iteration import Iteration
    from cory.trainer import CoryTrainer

RECORDS = 3
CLOSE = 0.05  # how far apart task rewards may be on another kind of processor
OF_THE_MACHINE = ("output", "resume", "callbacks", "tracker")
Kept = Mapping[str, Any]  # of a first_run.json


class Changed(Exception):
    """How the numbers of a run are not those that were kept."""


def keep(run: Path, out: Path, key: str, threads: int) -> None:
    """Keeps the beginning of a run in a folder of results, but for runs of tasks that were made in Python.

    Paths of this machine are not kept: who repeats the run names them.

    Args:
        run: its folder, made on this machine. key: `Planned.key` of the run. threads: with which it was made.
    """
    settings = read_settings(run)
    task = (settings.get("fingerprint") or {}).get("task")
    if task is None:
        return
    with (run / "metrics.jsonl").open(encoding="utf-8") as lines:
        records = [json.loads(line) for _, line in zip(range(RECORDS), lines, strict=False)]
    needed = [name for name, value in flat(_without_runs_own(settings)).items() if _is_local(value)]
    kept = {
        "key": key,
        "task": task,
        "made_on": conditions(threads),
        "commit": settings["versions"].get("commit", "unknown"),
        "needs": needed,
        "settings": _changed(_without_runs_own(settings), dict.fromkeys(needed, "FOLDER")),
        "records": records,
    }
    replace_text(out / FIRST_RUN, json.dumps(kept, indent=1) + "\n")


def _without_runs_own(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings without what belongs to it alone, on the device that it had."""
    from cory.parallel.devices import choose_device  # here, as it imports torch

    kept = {
        name: value
        for name, value in settings.items()
        if name not in (*BESIDE_SETTINGS, *OF_THE_MACHINE)
    }
    return kept | {"device": choose_device(settings["device"]).type}


def _is_local(value: Any) -> bool:
    """Whether a value, or one inside it, names a file or folder of this machine that the repository has not:
    /FOLDER/FIRST_RUN.py:NAME, models/NAME, ..."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_is_local, value))
    if not isinstance(value, str):
        return False
    path = Path(value.partition(":")[0])
    return path.is_absolute() or ("/" in value and (ROOT / path).exists() and not _is_tracked(path))


def _is_tracked(path: Path) -> bool:
    """Whether git has a file, or one in a folder, so that every clone has it. Without git: yes."""
    try:
        done = subprocess.run(["git", "ls-files", "--", path], cwd=ROOT, capture_output=True)
    except OSError:
        return True
    return bool(done.stdout or done.returncode)


def _changed(settings: Mapping[str, Any], changes: Mapping[str, str]) -> dict[str, Any]:
    """Nested settings with other values of some dotted keys."""
    result = json.loads(json.dumps(settings))
    for key, value in changes.items():
        *parents, name = key.split(".")
        block = result
        for parent in parents:
            block = block[parent]
        block[name] = value
    return result


def conditions(threads: int) -> dict[str, Any]:
    """What numbers depend on to the bit besides code and settings."""
    libraries = {name: version for name, version in versions().items() if name in ("torch", "trl")}
    return {"processor": processor(), "threads": threads, **libraries}


def processor() -> str:
    """The kind of this machine's processor, and the instructions that PyTorch uses on it."""
    import torch  # here and below, as importing it takes seconds

    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:  # no Linux
        pass
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


class StopAfter(Callback):
    """Ends a run once it has so many records."""

    def __init__(self, records: int) -> None:
        self.records = records

    def on_iteration_end(self, trainer: "CoryTrainer", iteration: "Iteration") -> None:
        trainer.should_stop = len(trainer.run.history) >= self.records


def repeated(kept: Kept, where: Path, changes: Mapping[str, str]) -> list[dict[str, Any]]:
    """The first records of the kept run, made again.

    Args:
        where: the file, for messages. changes: local folders by their key; those that it does not need are not read.

    Raises a UserError: a folder is not named, settings are not those of the task any more, or data are not here.
    """
    missing = [key for key in kept["needs"] if key not in changes]
    if missing:
        raise UserError(f"--set: expected the local folders of {', '.join(missing)}, got none")
    import torch

    from cory.agents import make_agents
    from cory.trainer import CoryTrainer

    kind = find_kind(kept["task"])
    needed = {key: changes[key] for key in kept["needs"]}
    config = as_config(kind.config, _changed(kept["settings"], needed), where)
    torch.set_num_threads(kept["made_on"]["threads"])
    count = len(kept["records"])
    with tempfile.TemporaryDirectory() as folder:
        config.output = str(Path(folder) / "run")
        held_out = kind.held_out_rows(config) if config.eval_every else None
        task = kind.make_task(config)
        trainer = CoryTrainer(
            config, make_agents(config), task, "first_run", held_out, [StopAfter(count)]
        )
        return trainer.train().history[:count]


def compare(kept: Kept, records: Sequence[Mapping[str, Any]], exactly: bool) -> None:
    """Compares records with those that were kept, in the metrics that these have. Raises Changed if they differ."""
    if not exactly:
        before = kept["records"][0]["task_reward"]
        now = records[0]["task_reward"]
        if not abs(before - now) <= CLOSE:
            raise Changed(f"task_reward of the first record: {before:.4f} -> {now:.4f}")
        return
    for number, (before, now) in enumerate(zip(kept["records"], records, strict=True), 1):
        for name, value in before.items():
            if not _same(value, now.get(name)):
                raise Changed(f"{name} of record {number}: {value} -> {now.get(name)}")


def _same(before: Any, now: Any) -> bool:
    both_nan = isinstance(before, float) and isinstance(now, float) and math.isnan(before + now)
    return both_nan or before == now


def check(folder: Path, changes: Mapping[str, str] | None = None) -> str:
    """Repeats the first run of a folder of results; returns how it was compared.

    Raises Changed, and a UserError as `repeated`, whose `changes` these are.
    """
    kept = json.loads((folder / FIRST_RUN).read_text(encoding="utf-8"))
    here = conditions(kept["made_on"]["threads"])
    different = [name for name, value in kept["made_on"].items() if here.get(name) != value]
    compare(kept, repeated(kept, folder / FIRST_RUN, changes or {}), exactly=not different)
    if different:
        there = ", ".join(f"{name} {kept['made_on'][name]}" for name in different)
        return f"first task reward within {CLOSE} (made with another {there})"
    return f"{len(kept['records'])} records, exactly"


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.check_results`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "folders",
        nargs="*",
        help="Folders of results. Default: all under results/ with a first run",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=FOLDER",
        help="A local folder, for the runs that need one. Those that lack one are left out",
    )
    args = parser.of(argv)
    changes = dict(text.split("=", 1) for text in args.set if "=" in text)
    if len(changes) < len(args.set):
        raise UserError(f"--set: expected KEY=FOLDER, such as model.name=FOLDER, got {args.set}")
    folders = [Path(name) for name in args.folders]
    for folder in folders:
        if not (folder / FIRST_RUN).is_file():
            raise UserError(f"folders: expected folders with a {FIRST_RUN}, got {str(folder)!r}")
    folders = folders or [path.parent for path in sorted((ROOT / "results").glob(f"*/{FIRST_RUN}"))]

    failed = 0
    for folder in folders:
        needs = json.loads((folder / FIRST_RUN).read_text(encoding="utf-8"))["needs"]
        if not args.folders and not set(needs) <= set(changes):
            print(f"{folder.name}: left out, as it needs --set of {', '.join(needs)}", flush=True)
            continue
        try:
            print(f"{folder.name}: {check(folder, changes)}", flush=True)
        except Changed as difference:
            failed += 1
            print(f"{folder.name}: CHANGED, {difference}", flush=True)
        except UserError as error:
            failed += 1
            print(f"{folder.name}: NOT REPEATED, {error}", flush=True)
    if failed:
        raise UserError(f"{failed} of {len(folders)} folders of results are not those of this code")


if __name__ == "__main__":
    main(command_line)
