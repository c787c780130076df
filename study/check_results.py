"""Repeats the beginning of the first run of each folder of results: does the current code still give these numbers?

    python -m study.check_results                             # every folder under results/ that keeps its first run
    python -m study.check_results results/NAME                # one of them

`study.experiment` keeps the first run that it makes for a folder, if others can repeat it: its settings, where it ran,
and its first three records of metrics.jsonl. On the same kind of processor, with the same libraries and threads, they
must come out exactly; elsewhere a difference is only said.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cory.command import BESIDE_SETTINGS, Arguments, as_config, main
from cory.errors import UserError
from cory.identity import versions
from cory.run.folder import read_rows, write_text
from cory.run.settings import read_settings
from cory.task_kinds import find_kind
from study.plan import ROOT

FIRST_RUN = "first_run.json"
RECORDS = 3
LEFT_OUT = (*BESIDE_SETTINGS, "output", "resume", "callbacks", "tracker")


def keep(run: Path, out: Path, threads: int) -> None:
    """Keeps the beginning of a run in a folder of results, if others can repeat it.

    They cannot where its task was made in Python, or names files that git does not have.

    Args:
        run: its folder, made on this machine. threads: with which it was made.
    """
    from cory.parallel.devices import choose_device  # here, as it imports torch

    settings = read_settings(run)
    task = (settings.get("fingerprint") or {}).get("task")
    kept = {name: value for name, value in settings.items() if name not in LEFT_OUT}
    if task is None:
        return
    if _is_local(kept):
        return
    kept["device"] = choose_device(settings["device"]).type
    content = {
        "task": task,
        "made_on": conditions(threads),
        "commit": settings["versions"].get("commit", "unknown"),
        "settings": kept,
        "records": read_rows(run / "metrics.jsonl")[:RECORDS],
    }
    write_text(out / FIRST_RUN, json.dumps(content, indent=1) + "\n")


def _is_local(value: Any) -> bool:
    """Whether settings name a file or folder that git does not have, such as models/NAME or /FOLDER/FILE.py:NAME."""
    if isinstance(value, Mapping):
        return any(map(_is_local, value.values()))
    if isinstance(value, list):
        return any(map(_is_local, value))
    if not isinstance(value, str) or not value:
        return False
    path = value.partition(":")[0]
    if not os.path.exists(ROOT / path):  # a model on the Hub, or a prompt
        return False
    listed = subprocess.run(["git", "ls-files", "--", path], cwd=ROOT, capture_output=True)
    return os.path.isabs(path) or not listed.stdout


def default_threads() -> int:
    """The threads with which a process computes that nobody tells."""
    import torch

    return torch.get_num_threads()


def conditions(threads: int) -> dict[str, Any]:
    """What numbers depend on to the bit besides code and settings."""
    import torch  # here and below, as importing it takes seconds

    from cory.parallel.devices import processor

    computes = f"{processor()}, {torch.backends.cpu.get_cpu_capability()}"
    libraries = {name: version for name, version in versions().items() if name in ("torch", "trl")}
    return {"processor": computes, "threads": threads, **libraries}


def repeat(kept: Mapping[str, Any], where: Path) -> list[dict[str, Any]]:
    """The first records of the kept run, made again. `where`: its file, for messages.

    Raises a UserError: settings are not those of the task any more, or data are not here.
    """
    import torch

    from cory.agent import make_agents
    from cory.trainer import CoryTrainer

    kind = find_kind(kept["task"])
    config = as_config(kind.config, kept["settings"], where)
    torch.set_num_threads(kept["made_on"]["threads"])
    with tempfile.TemporaryDirectory() as folder:
        config.output = str(Path(folder) / "run")
        config.iterations = 1 + max(record["iteration"] for record in kept["records"])
        held_out = kind.held_out_rows(config) if config.eval_every else None
        agents, task = make_agents(config), kind.make_task(config)
        trainer = CoryTrainer(config, agents, task, "first_run", held_out)
        return trainer.train().history[: len(kept["records"])]


def difference(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """The first difference of records, in the metrics that the earlier ones have; empty: there is none."""
    for number, (old, new) in enumerate(zip(before, now, strict=True), 1):
        for name, value in old.items():
            if json.dumps(value) != json.dumps(new.get(name)):  # a NaN is the same as a NaN
                return f"{name} of record {number}: {value} -> {new.get(name)}"
    return ""


def check(folder: Path) -> tuple[bool, str]:
    """Repeats the first run of a folder of results: whether its numbers came out, and what to say of it."""
    kept = json.loads((folder / FIRST_RUN).read_text(encoding="utf-8"))
    try:
        changed = difference(kept["records"], repeat(kept, folder / FIRST_RUN))
    except UserError as error:
        return False, f"NOT REPEATED, {error}"
    if not changed:
        return True, "equal"
    here = conditions(kept["made_on"]["threads"])
    if here != kept["made_on"]:
        return True, f"{changed}; it was made on {kept['made_on']}, and this is {here}"
    return False, f"CHANGED, {changed}"


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.check_results`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("folders", nargs="*", help="Folders of results. Default: all of results/")
    args = parser.parse_args(argv)
    folders = [Path(name) for name in args.folders]
    for folder in folders:
        if not (folder / FIRST_RUN).is_file():
            raise UserError(f"folders: expected folders with a {FIRST_RUN}, got {str(folder)!r}")
    folders = folders or [path.parent for path in sorted((ROOT / "results").glob(f"*/{FIRST_RUN}"))]
    failed = 0
    for folder in folders:
        came_out, message = check(folder)
        failed += not came_out
        print(f"{folder.name}: {message}", flush=True)
    if failed:
        raise UserError(f"{failed} of {len(folders)} folders of results are not those of this code")


if __name__ == "__main__":
    main(command_line)
