"""Repeats the beginning of the first run of each folder of results: does the current code still give these numbers?

    python -m study.check_results                             # every folder under results/ that keeps its first run
    python -m study.check_results results/NAME --set model.name=FOLDER     # where a run needs local folders

`study.experiment` keeps the first run that it makes for a folder: its settings, where it ran, and its first three
records of metrics.jsonl. On the same kind of processor, with the same libraries and threads, they must come out
exactly; elsewhere the task reward of the first record within 0.05. Folders whose page is frozen are left out.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cory.cli.arguments import Arguments
from cory.cli.load import BESIDE_SETTINGS, as_config
from cory.cli.main import main
from cory.errors import UserError
from cory.identity import versions
from cory.run.folder import write_text
from cory.run.settings import read_settings
from cory.tasks.kind import find_kind
from study.frozen import frozen_at
from study.planned import FIRST_RUN
from study.records import flat
from study.scripts import ROOT

RECORDS = 3
CLOSE = 0.05  # how far apart task rewards may be on another kind of processor
LEFT_OUT = (*BESIDE_SETTINGS, "output", "resume", "callbacks", "tracker")
Kept = Mapping[str, Any]  # of a first_run.json


def keep(run: Path, out: Path, threads: int) -> None:
    """Keeps the beginning of a run in a folder of results. A task that was made in Python has none to repeat.

    Args:
        run: its folder, made on this machine. threads: with which it was made.
    """
    from cory.parallel.devices import choose_device  # here, as it imports torch

    settings = read_settings(run)
    task = (settings.get("fingerprint") or {}).get("task")
    if task is None or settings["ppo"]["schedule"] != "constant":
        return  # the repetition, which is shorter, would have other learning rates
    kept = {name: value for name, value in settings.items() if name not in LEFT_OUT}
    kept["device"] = choose_device(settings["device"]).type
    # Who repeats the run names the files that other clones do not have.
    needs = [key for key, value in flat(kept).items() if _is_local(value)]
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    content = {
        "task": task,
        "made_on": conditions(threads),
        "commit": settings["versions"].get("commit", "unknown"),
        "needs": needs,
        "settings": _with(kept, dict.fromkeys(needs, "FOLDER")),
        "records": [json.loads(line) for line in lines[:RECORDS]],
    }
    write_text(out / FIRST_RUN, json.dumps(content, indent=1) + "\n")


def _is_local(value: Any) -> bool:
    """Whether a setting names a file or folder that git does not have, such as models/NAME or /FOLDER/FILE.py:NAME."""
    if not isinstance(value, str) or "/" not in value:
        return False
    path = Path(value.partition(":")[0])
    if path.is_absolute() or not (ROOT / path).exists():
        return path.is_absolute()
    listed = subprocess.run(["git", "ls-files", "--", path], cwd=ROOT, capture_output=True)
    return listed.returncode == 0 and not listed.stdout


def _with(settings: Mapping[str, Any], changes: Mapping[str, str]) -> dict[str, Any]:
    """Nested settings with other values of some dotted keys."""
    result: dict[str, Any] = json.loads(json.dumps(settings))
    for key, value in changes.items():
        *parents, name = key.split(".")
        block = result
        for parent in parents:
            block = block[parent]
        block[name] = value
    return result


def conditions(threads: int) -> dict[str, Any]:
    """What numbers depend on to the bit besides code and settings."""
    import torch  # here and below, as importing it takes seconds

    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    processor = f"{found[1] if found else 'unknown'}, {torch.backends.cpu.get_cpu_capability()}"
    libraries = {name: version for name, version in versions().items() if name in ("torch", "trl")}
    return {"processor": processor, "threads": threads, **libraries}


def repeat(kept: Kept, where: Path, folders: Mapping[str, str]) -> list[dict[str, Any]]:
    """The first records of the kept run, made again. `where`: its file, for messages. `folders`: by their keys.

    Raises a UserError: settings are not those of the task any more, or data are not here.
    """
    import torch

    from cory.agents import make_agents
    from cory.trainer import CoryTrainer

    kind = find_kind(kept["task"])
    needed = {key: folders[key] for key in kept["needs"]}
    config = as_config(kind.config, _with(kept["settings"], needed), where)
    torch.set_num_threads(kept["made_on"]["threads"])
    with tempfile.TemporaryDirectory() as folder:
        config.output = str(Path(folder) / "run")
        config.iterations = 1 + max(record["iteration"] for record in kept["records"])
        held_out = kind.held_out_rows(config) if config.eval_every else None
        agents, task = make_agents(config), kind.make_task(config)
        trainer = CoryTrainer(config, agents, task, "first_run", held_out)
        return trainer.train().history[: len(kept["records"])]


def difference(kept: Kept, records: Sequence[Mapping[str, Any]], exactly: bool) -> str:
    """The first difference of records to those that were kept, in the metrics that these have; empty: there is none."""
    if not exactly:
        before, now = kept["records"][0]["task_reward"], records[0]["task_reward"]
        return "" if abs(before - now) <= CLOSE else f"task_reward of record 1: {before} -> {now}"
    for number, (before, now) in enumerate(zip(kept["records"], records, strict=True), 1):
        for name, value in before.items():
            if json.dumps(value) != json.dumps(now.get(name)):  # a NaN is the same as a NaN
                return f"{name} of record {number}: {value} -> {now.get(name)}"
    return ""


def check(folder: Path, folders: Mapping[str, str]) -> tuple[bool, str]:
    """Repeats the first run of a folder of results: whether its numbers came out, and what to say of it."""
    kept = json.loads((folder / FIRST_RUN).read_text(encoding="utf-8"))
    if commit := frozen_at(folder / "README.md"):
        return True, f"left out, as its page is frozen at {commit}"
    missing = [key for key in kept["needs"] if key not in folders]
    if missing:
        return True, f"left out, as it needs --set of {', '.join(missing)}"
    here = conditions(kept["made_on"]["threads"])
    other = [name for name, value in kept["made_on"].items() if here.get(name) != value]
    try:
        records = repeat(kept, folder / FIRST_RUN, folders)
    except UserError as error:
        return False, f"NOT REPEATED, {error}"
    if changed := difference(kept, records, exactly=not other):
        return False, f"CHANGED, {changed}"
    if other:
        made_on = ", ".join(f"{name} {kept['made_on'][name]}" for name in other)
        return True, f"first task reward within {CLOSE} (made with another {made_on})"
    return True, f"{len(records)} records, exactly"


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.check_results`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("folders", nargs="*", help="Folders of results. Default: all of results/")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=FOLDER",
        help="A local folder, for the runs that need one. Those that lack one are left out",
    )
    args = parser.of(argv)
    if not all("=" in text for text in args.set):
        raise UserError(f"--set: expected KEY=FOLDER, such as model.name=FOLDER, got {args.set}")
    local_folders = dict(text.split("=", 1) for text in args.set)
    folders = [Path(name) for name in args.folders]
    for folder in folders:
        if not (folder / FIRST_RUN).is_file():
            raise UserError(f"folders: expected folders with a {FIRST_RUN}, got {str(folder)!r}")
    folders = folders or [path.parent for path in sorted((ROOT / "results").glob(f"*/{FIRST_RUN}"))]
    failed = 0
    for folder in folders:
        came_out, message = check(folder, local_folders)
        failed += not came_out
        print(f"{folder.name}: {message}", flush=True)
    if failed:
        raise UserError(f"{failed} of {len(folders)} folders of results are not those of this code")


if __name__ == "__main__":
    main(command_line)
