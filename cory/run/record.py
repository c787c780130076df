"""What a run's folder records: its settings, and how far it is. Importing this does not import torch."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from cory.errors import UserError
from cory.yaml_file import read_yaml


def read_settings(run: Path) -> dict[str, Any]:
    """A run's config.yaml: settings, fingerprint, versions, changes. Nothing in it is executed.

    Raises a UserError if there is none, or if it cannot be read.
    """
    try:
        return read_yaml(run / "config.yaml")
    except UserError as error:
        raise UserError(
            f"expected the folder of a run, with a config.yaml, got {str(run)!r} ({error})"
        ) from None


CALLBACK = "a callback"  # that has ended a run early, in the place of a guard's name
BEST = "best"  # in a run's folder, that of its best agents (`guards.patience`)


def named(folder: Path) -> Path:
    """The folder by a path that ends with its name: not `.` or `..`."""
    return folder if folder.name not in ("", "..") else folder.resolve()


def recorded_iterations(run: Path) -> int:
    """The number of iterations in metrics.jsonl, without a line that was cut short by a kill."""
    last = -1
    with suppress(OSError):
        for line in (
            (run / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            with suppress(ValueError, LookupError, TypeError):
                last = max(last, json.loads(line)["iteration"])
    return last + 1


def finished_iterations(run: Path) -> int | None:
    """The number of iterations after which the run was finished and its agents saved; None: it was never finished.

    A finished run that is being extended has more in metrics.jsonl, and its agents are still those of its end.
    """
    iterations = _summary(run).get("iterations")
    return iterations if isinstance(iterations, int) else None


def stopped_by(run: Path) -> str | None:
    """What ended a run before its last iteration: a guard, such as `guards.patience`, or CALLBACK; None: nothing."""
    return _summary(run).get("stopped_by")


def _summary(folder: Path) -> dict[str, Any]:
    """The summary.json of a run; empty if it has none that can be read."""
    with suppress(OSError, ValueError):
        content = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}
