"""How many held-out queries also stand in the training data of the runs that are evaluated."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset

from cory.config import Config
from cory.errors import UserError
from cory.identity import data_hash
from cory.metrics import in_training
from cory.roles import query_text
from cory.run.settings import read_settings
from cory.task_kinds import TaskKind, kind_of_run

# The rows that were trained on, or a function that makes them from a run's settings.
TrainedOn: TypeAlias = Dataset | Callable[[Any], Dataset]


def shares_in_training(
    runs: Mapping[Path, Config], queries: Sequence[str], trained_on: TrainedOn | None = None
) -> dict[str, float | None]:
    """By the name of a run, the share of the held-out queries that also stand in its training data.

    None where that data is not known; why, is printed. The rows must be those that the run recorded, by their hash.

    Args:
        runs: their settings, by folder.
        queries: held-out ones, as `query_text` has them.
        trained_on: what was trained on. None: as the kind of each run's task has it.
    """
    shares: dict[str, float | None] = {}
    texts: dict[str, set[str]] = {}  # by the hash of the rows: runs mostly were trained on the same
    for run, config in runs.items():
        settings = read_settings(run)
        recorded = (settings.get("fingerprint") or {}).get("dataset_sha256")
        try:
            if recorded not in texts:
                rows = _training_rows(kind_of_run(settings), config, trained_on)
                current = data_hash(rows)
                if recorded not in (current, None):
                    raise UserError(
                        f"expected the training data that it recorded, {recorded}, got other rows, {current}"
                    )
                recorded = current
                texts[recorded] = {query_text(prompt) for prompt in rows["prompt"]}
            shares[run.name] = in_training(queries, texts[recorded])
        except UserError as error:
            shares[run.name] = None
            print(
                f"Not known how many held-out queries {run} was trained on: {error}",
                file=sys.stderr,
            )
    return shares


def _training_rows(
    kind: TaskKind[Any] | None, config: Config, trained_on: TrainedOn | None
) -> Dataset:
    if isinstance(trained_on, Dataset):
        return trained_on
    if trained_on is not None:
        return trained_on(config)
    if kind is None:
        raise UserError(
            "expected its training data as evaluate(..., trained_on=task.dataset), got none"
        )
    return kind.training_rows(config)


def in_words(queries: Sequence[str], shares: Mapping[str, float | None]) -> str:
    """How many queries there are, how many of them differ, and how many were trained on.

    >>> in_words(["a", "b", "a"], {"one": 0.0, "two": 1 / 3, "three": None})
    '3 queries (2 distinct), 0 to 33.3 % of them also in training (not known of three)'
    """
    text = "1 query" if len(queries) == 1 else f"{len(queries)} queries"
    distinct = len(set(queries))
    if distinct < len(queries):
        text += f" ({distinct} distinct)"
    if not shares:
        return text
    numbers = [share for share in shares.values() if share is not None]
    if not numbers:
        return f"{text}, not known how many of them also in training"
    ends = dict.fromkeys(f"{100 * share:.3g}" for share in (min(numbers), max(numbers)))
    text += f", {' to '.join(ends)} % of them also in training"
    unknown = [name for name, share in shares.items() if share is None]
    if unknown:
        text += f" (not known of {', '.join(unknown)})"
    return text
