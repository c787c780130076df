"""Repeats the beginning of the first run of each folder of results: does the current code still give these numbers?

    python -m results.check                     # every folder under results/ that keeps its first run
    python -m results.check results/NAME        # one of them

`study/first_run.py` keeps it. On the same kind of processor, with the same libraries and threads, the records must come
out exactly; elsewhere a difference is only said.
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


def repeat(kept: Mapping[str, Any], where: Path) -> list[dict[str, Any]]:
    """The first records of the kept run, made again. `where`: its file, for messages.

    Raises a UserError: settings are not those of the task any more, or data are not here.
    """
    import torch

    from cory.build import make_agents
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


def first_difference(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
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
        changed = first_difference(kept["records"], repeat(kept, folder / FIRST_RUN))
    except UserError as error:
        return False, f"NOT REPEATED, {error}"
    if not changed:
        return True, "equal"
    here = conditions(kept["made_on"]["threads"])
    if here != kept["made_on"]:
        return True, f"{changed}; it was made on {kept['made_on']}, and this is {here}"
    return False, f"CHANGED, {changed}"


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m results.check`: see the module."""
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
