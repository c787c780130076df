"""Reads runs from their folders: settings, metrics, sample texts, and whether they ended."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cory.errors import UserError
from cory.report.payload import flat as flat
from cory.report.payload import shown as shown
from cory.report.summary import CURVES
from cory.run.record import read_settings


@dataclass
class Record:
    """One run.

    Args:
        folder: where it is.
        settings: what its config.yaml holds, `versions` and `fingerprint` included.
        rows: of its metrics.jsonl, those of whole iterations.
        samples: before and after training, by agent; empty for a run that has not ended.
        stopped: whether it was ended early on purpose (`guards.stop_at_kl`, a callback).
        problems: in words; empty for a run that ended as it should.
    """

    folder: Path
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    samples: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    stopped: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def agents(self) -> list[str]:
        """Names, `agent_1` first; of those that have had a role."""
        return natural({row["agent"] for row in self.rows})

    @property
    def iterations(self) -> int:
        """How many are recorded."""
        return max((row["iteration"] for row in self.rows), default=-1) + 1

    @property
    def complete(self) -> bool:
        """Whether all its iterations are there and every number is finite."""
        return not self.problems

    def of(self, agent: str, last: int | None = None) -> list[dict[str, Any]]:
        """An agent's rows; with `last`, only those of the last iterations in which it had a role."""
        rows = [row for row in self.rows if row["agent"] == agent]
        iterations = sorted({row["iteration"] for row in rows})
        kept = set(iterations if last is None else iterations[-last:])
        return [row for row in rows if row["iteration"] in kept]


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
        raise UserError(f"expected the folder of a run, with a metrics.jsonl, got {str(folder)!r} ({error})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            rows.append({**row, "iteration": int(row["iteration"]), **{key: float(row[key]) for key in CURVES}})
        except (ValueError, TypeError, KeyError):
            record.problems.append(f"line {number} of metrics.jsonl is damaged; what follows is left out")
            break
    agents = num_roles(record.settings)
    count: dict[int, int] = {}
    for row in rows:
        count[row["iteration"]] = count.get(row["iteration"], 0) + 1
    record.rows = [row for row in rows if count[row["iteration"]] == agents]
    bad = [row["iteration"] for row in record.rows if not all(math.isfinite(row[key]) for key in CURVES)]
    wrong = min(bad, default=None)
    planned = record.settings.get("iterations")
    if not record.rows:
        record.problems.append("no iteration is recorded")
    elif wrong is not None:
        record.problems.append(f"diverged: a metric is not finite in iteration {wrong + 1}; what follows is left out")
        record.rows = [row for row in record.rows if row["iteration"] < wrong]
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        record.samples, record.stopped = summary.get("samples", {}), summary.get("stopped", False)
        recorded = len({row["iteration"] for row in record.rows})
        ended = summary.get("iterations", recorded)
        if not record.problems and recorded < ended:
            record.problems.append(f"metrics.jsonl has {recorded} of the {ended} iterations")
        elif not record.problems and recorded > ended:
            record.problems.append(f"incomplete: finished after {ended} iterations, then extended to {recorded} so far")
    except (OSError, ValueError, AttributeError):
        if record.rows:
            record.problems.append(f"incomplete: {record.iterations} of {planned} iterations, and no summary.json")
    return record


def num_agents(settings: Mapping[str, Any]) -> int:
    """How many agents a run has."""
    block = settings.get("cory")
    return block.get("num_agents", 2) if isinstance(block, dict) else 2


def first_role(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a run's first role, its `name` among them."""
    roles = settings.get("roles") or [{}]
    return {**roles[0], "name": roles[0].get("name") or "pioneer"}


def num_roles(settings: Mapping[str, Any]) -> int:
    """How many roles a run's chain has, each with a row in every iteration."""
    block = settings.get("cory")
    length = block.get("chain_length") if isinstance(block, dict) else None
    return num_agents(settings) if length is None else length
