"""Counts the facts in each run's notes, from the responses of its evaluation on fresh.jsonl.

    python -m examples.notes.facts FOLDER_OF_RUNS/evaluation/*/responses.jsonl

Prints a JSON line for each run and one for the untrained model: how many notes name 0, 1, 2, 3 and 4 facts
(`notes_by_facts_named`), and the first five listings, each with its note and answer.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cory.run.folder import parse_rows

from .make import FACTS, QUESTIONS, flats_of
from .metrics import is_named

FIRST = 5


def note_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yields a line for each note-taker of an evaluation: a run's first agent, or the untrained model."""
    notes: dict[str, dict[int, str]] = {}  # by model and query, like `answers`
    answers: dict[str, dict[int, str]] = {}
    for row in parse_rows(file.read_text(encoding="utf-8"), str(file)):
        text = row["completions"][0].strip()
        if row["role"] == "note_taker":
            notes.setdefault(row["model"], {})[row["query"]] = text
        else:
            answers.setdefault(row["read"], {})[row["query"]] = text
    for model in notes:
        run, _, agent = model.partition("/")
        if agent in ("", "agent_1"):
            yield {"run": run, **facts_named(notes[model], answers[model])}


def facts_named(notes: Mapping[int, str], answers: Mapping[int, str]) -> dict[str, Any]:
    """Counts the facts that notes name, and returns the counts with the first notes.

    Args:
        notes: notes by query; a query is a row number of fresh.jsonl.
        answers: answers by query.
    """
    flats = flats_of("fresh")
    fact_counts = Counter(
        sum(is_named(note, flats[query][fact]) for fact in FACTS) for query, note in notes.items()
    )
    first = [
        {
            "listing": flats[query]["listing"],
            "note": notes[query],
            "question": QUESTIONS[flats[query]["asked"]],
            "answer": answers[query],
            "right": flats[query][flats[query]["asked"]],
        }
        for query in sorted(notes)[:FIRST]
    ]
    counts = [fact_counts[number] for number in range(len(FACTS) + 1)]
    return {"notes_by_facts_named": counts, "first": first}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="responses.jsonl of evaluations")
    for file in parser.parse_args().files:
        for line in note_lines(file):
            print(json.dumps(line))
