"""Checks that the current code reproduces the results, by repeating the beginning of each folder's first run.

    python -m results.check                     # every folder under results/ with a first_run.json
    python -m results.check results/NAME        # one folder

`study/first_run.py` keeps the beginning of a folder's first run. On the same kind of processor, with the same libraries
and threads, the records must be reproduced exactly. Under other conditions, differences are only reported.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cory.command import Arguments, main
from cory.errors import UserError
from cory.settings import as_config
from cory.task_kinds import find_kind
from study.first_run import FIRST_RUN, conditions
from study.plan import ROOT


def repeat(kept: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    """Repeats the beginning of a kept run and returns its records.

    Args:
        kept: the content of first_run.json.
        file: the path of first_run.json, for messages.

    Raises:
        UserError: the settings no longer fit the task, or data are missing.
    """
    import torch

    from cory.build import make_agents
    from cory.trainer import CoryTrainer

    kind = find_kind(kept["task"])
    config = as_config(kind.config, kept["settings"], file)
    torch.set_num_threads(kept["made_on"]["threads"])
    with tempfile.TemporaryDirectory() as folder:
        config.output = str(Path(folder) / "run")
        config.iterations = 1 + max(record["iteration"] for record in kept["records"])
        held_out = kind.held_out_rows(config) if config.eval_every else None
        agents, task = make_agents(config), kind.make_task(config)
        trainer = CoryTrainer(config, agents, task, "first_run", held_out)
        return trainer.train().history[: len(kept["records"])]


def first_difference(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """Describes the first difference between records; empty if there is none. Metrics only in `now` do not count."""
    for number, (old, new) in enumerate(zip(before, now, strict=True), 1):
        for name, value in old.items():
            if json.dumps(value) != json.dumps(new.get(name)):  # as text, NaN equals NaN
                return f"{name} of record {number}: {value} -> {new.get(name)}"
    return ""


def check(folder: Path) -> tuple[bool, str]:
    """Repeats the beginning of a folder's first run. Returns whether the check passed, and a message."""
    kept = json.loads((folder / FIRST_RUN).read_text(encoding="utf-8"))
    try:
        changed = first_difference(kept["records"], repeat(kept, folder / FIRST_RUN))
    except UserError as error:
        return False, f"NOT REPEATED, {error}"
    if not changed:
        return True, "equal"
    current = conditions(kept["made_on"]["threads"])
    if current != kept["made_on"]:
        return True, f"{changed}; made on {kept['made_on']}, repeated on {current}"
    return False, f"CHANGED, {changed}"


def command_line(argv: Sequence[str] | None = None) -> None:
    """Runs `python -m results.check`; see the module's docstring."""
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
        passed, message = check(folder)
        failed += not passed
        print(f"{folder.name}: {message}", flush=True)
    if failed:
        raise UserError(f"{failed} of {len(folders)} folders of results do not match this code")


if __name__ == "__main__":
    main(command_line)
