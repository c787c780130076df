"""What the folder of an evaluation holds. Importing this does not import torch."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cory.errors import UserError
from cory.evaluation.agents import run_agents
from cory.identity import model_identity

RESPONSES = "responses.jsonl"  # a line for each model and query


def read_responses(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The records of responses.jsonl, by model and query."""
    lines = (folder / RESPONSES).read_text(encoding="utf-8").splitlines()
    records = map(json.loads, lines)
    return {(record["model"], record["query"]): record for record in records}


def trained(models: Sequence[str]) -> dict[str, str]:
    """For each run among the models, a hash of its results and its agents, which differs if it was trained again."""
    hashes = {}
    for name in models:
        with suppress(OSError, ValueError):
            summary = json.loads((Path(name) / "summary.json").read_text(encoding="utf-8"))
            results: list[Any] = [summary.get(key) for key in ("iterations", "agents", "samples")]
            results += [model_identity(str(agent)) for agent in run_agents(Path(name)).values()]
            hashes[name] = hashlib.sha256(json.dumps(results).encode()).hexdigest()[:16]
    return hashes


def check_untouched(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raises a UserError if runs were trained on while they were evaluated: what `trained` said before and after."""
    again = [run for run in before if before[run] != after.get(run)]
    if again:
        raise UserError(
            f"expected runs that stay as they are while they are evaluated, got {', '.join(again)} trained again. "
            "Evaluate them anew"
        )
