"""How many facts the notes of each run name, and its first notes, from the responses of its evaluation on fresh.jsonl.

    python -m examples.notes.facts FOLDER_OF_RUNS/evaluation/*/responses.jsonl

A JSON line for each run, and one for the untrained model: on how many of the listings its note names 0, 1, 2, 3 and 4
facts (`notes_by_facts_named`), and the first five listings, each with note and answer.
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


def of_responses(file: Path) -> Iterator[dict[str, Any]]:
    """The line of each note-taker of an evaluation: a run's first agent, or the untrained model."""
    notes: dict[str, dict[int, str]] = {}  # by model and query, as answers
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
            yield {"run": run, **of_notes(notes[model], answers[model])}


def of_notes(notes: Mapping[int, str], answers: Mapping[int, str]) -> dict[str, Any]:
    """How many facts the notes name, and the first of them. Both by query, which is a row of fresh.jsonl."""
    flats = flats_of("fresh")
    named = Counter(
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
    counts = [named[number] for number in range(len(FACTS) + 1)]
    return {"notes_by_facts_named": counts, "first": first}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="responses.jsonl of evaluations")
    for file in parser.parse_args().files:
        for line in of_responses(file):
            print(json.dumps(line))
