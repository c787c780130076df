"""Reads runs from their folders: settings, metrics, sample texts, and whether they ended."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cory.errors import UserError
from cory.metrics import CURVES
from cory.plural import counted
from cory.run.settings import read_settings


@dataclass
class Record:
    """One run.

    Args:
        folder: where it is.
        settings: what its config.yaml holds, `versions` and `fingerprint` included.
        rows: of its metrics.jsonl, those of whole iterations.
        samples: before and after training, by agent; empty for a run that has not ended.
        stopped: whether it was ended early on purpose (`guards.stop_at_kl`, a callback).
        stopped_by: the guard that ended it early, such as `guards.stop_at_kl`, or "a callback"; empty if none did.
        problems: in words; empty for a run that ended as it should.
    """

    folder: Path
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    samples: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    stopped: bool = False
    stopped_by: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def iterations(self) -> int:
        """How many are recorded."""
        return max((row["iteration"] for row in self.rows), default=-1) + 1


def natural(names: Iterable[str]) -> list[str]:
    """Agents' names in order: `agent_2` before `agent_10`."""
    return sorted(names, key=lambda name: (len(name), name))


def read(folder: Path) -> Record:
    """Reads a run's folder; what is wrong with the run is in `problems`.

    Raises:
        UserError: it is no run's folder, or its files cannot be read.
    """
    record = Record(folder, read_settings(folder), [])
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"expected the folder of a run, with a metrics.jsonl, got {str(folder)!r} ({error})"
        ) from None

    rows = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            numbers = {key: float(row[key]) for key in CURVES}
            rows.append({**row, "iteration": int(row["iteration"]), **numbers})
        except (ValueError, TypeError, KeyError):
            record.problems.append(
                f"line {number} of metrics.jsonl is damaged, and what follows is left out"
            )
            break

    # An iteration is whole if each role has its row.
    roles_of: dict[int, int] = {}
    for row in rows:
        roles_of[row["iteration"]] = roles_of.get(row["iteration"], 0) + 1
    record.rows = [row for row in rows if roles_of[row["iteration"]] == num_roles(record.settings)]

    diverged = [
        row["iteration"]
        for row in record.rows
        if not all(math.isfinite(row[key]) for key in CURVES)
    ]
    if not record.rows:
        record.problems.append("no iteration is recorded")
    elif diverged:
        first = min(diverged)
        record.problems.append(
            f"diverged: a metric is not finite in iteration {first + 1}, and what follows is left out"
        )
        record.rows = [row for row in record.rows if row["iteration"] < first]
    _read_summary(record)
    return record


def _read_summary(record: Record) -> None:
    """Adds what is written at a run's end; without it the run is incomplete."""
    recorded = len({row["iteration"] for row in record.rows})
    try:
        summary = json.loads((record.folder / "summary.json").read_text(encoding="utf-8"))
        record.samples = summary.get("samples", {})
        record.stopped = summary.get("stopped", False)
        record.stopped_by = summary.get("stopped_by", "")
        ended = summary.get("iterations", recorded)
    except (OSError, ValueError, AttributeError):
        if record.rows:
            planned = record.settings["iterations"]
            record.problems.append(
                f"incomplete: {record.iterations} of {counted(planned, 'iteration')}, and no summary.json"
            )
        return
    if record.problems:
        return
    if recorded < ended:
        record.problems.append(f"metrics.jsonl has {recorded} of the {counted(ended, 'iteration')}")
    elif recorded > ended:
        record.problems.append(
            f"incomplete: finished after {counted(ended, 'iteration')}, then extended to {recorded} so far"
        )


def short_version(version: str) -> str:
    """A version of the code as pages show it.

    >>> short_version("0123456789abcdef-dirty")
    '0123456789ab with changes'
    """
    return version[:12] + (" with changes" if version.endswith("-dirty") else "")


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted keys."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        result |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
        )
    return result


def shown(value: Any) -> str:
    """A setting as tables show it: the last two parts of an absolute path, as the rest depends on the machine."""
    path = Path(value) if isinstance(value, str) else None
    return "/".join(path.parts[-2:]) if path and path.is_absolute() else str(value)


def num_agents(settings: Mapping[str, Any]) -> int:
    """How many agents a run has."""
    return settings["cory"]["num_agents"]


def num_roles(settings: Mapping[str, Any]) -> int:
    """How many roles a run's chain has, each with a row in every iteration."""
    length = settings["cory"].get("chain_length")
    return num_agents(settings) if length is None else length
