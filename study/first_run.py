"""Keeps the beginning of an experiment's first run, so that later code can be checked against it.

The file first_run.json holds the run's settings, the conditions under which it ran, and the first three records of its
metrics.jsonl. With the same kind of processor, libraries and number of threads, the records are reproduced exactly.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cory.identity import versions
from cory.run.folder import read_rows, write_text
from cory.run.settings import read_settings
from cory.settings import BESIDE_SETTINGS
from study.plan import ROOT

FIRST_RUN = "first_run.json"
RECORDS = 3
LEFT_OUT = (*BESIDE_SETTINGS, "output", "resume", "callbacks", "tracker")


def keep(run: Path, out: Path, threads: int) -> None:
    """Keeps the beginning of a run in a folder of results, if anyone can repeat the run.

    Nothing is kept if the settings name files that git does not track.

    Args:
        run: the run's folder; it was trained on this machine.
        out: the folder of results.
        threads: the number of threads with which the run was trained.
    """
    from cory.parallel.devices import choose_device  # imported late, as it imports torch

    settings = read_settings(run)
    kept_settings = {name: value for name, value in settings.items() if name not in LEFT_OUT}
    if _is_local(kept_settings):
        return
    kept_settings["device"] = choose_device(settings["device"]).type
    content = {
        "task": settings["fingerprint"]["task"],
        "made_on": conditions(threads),
        "commit": settings["versions"].get("commit", "unknown"),
        "settings": kept_settings,
        "records": read_rows(run / "metrics.jsonl")[:RECORDS],
    }
    write_text(out / FIRST_RUN, json.dumps(content, indent=1) + "\n")


def _is_local(value: Any) -> bool:
    """Whether settings name a file or folder that git does not track, such as models/NAME or /FOLDER/FILE.py:NAME."""
    if isinstance(value, Mapping):
        return any(map(_is_local, value.values()))
    if isinstance(value, list):
        return any(map(_is_local, value))
    if not isinstance(value, str) or not value:
        return False
    path = value.partition(":")[0]
    if not os.path.exists(ROOT / path):  # a model on the Hub, or a prompt
        return False
    if os.path.isabs(path):
        return True
    listed = subprocess.run(["git", "ls-files", "--", path], cwd=ROOT, capture_output=True)
    return not listed.stdout


def default_threads() -> int:
    """Returns the number of threads that torch uses by default."""
    import torch

    return torch.get_num_threads()


def conditions(threads: int) -> dict[str, Any]:
    """Returns the conditions that affect a run's exact numbers, in addition to code and settings."""
    import torch  # imported late, as it takes seconds

    from cory.parallel.devices import processor

    processor_name = f"{processor()}, {torch.backends.cpu.get_cpu_capability()}"
    libraries = {name: version for name, version in versions().items() if name in ("torch", "trl")}
    return {"processor": processor_name, "threads": threads, **libraries}
