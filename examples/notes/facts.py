"""How many facts the notes of each run name, and its first notes, from the responses of its evaluation on fresh.jsonl.

    python -m examples.notes.facts FOLDER_OF_RUNS/evaluation/*/responses.jsonl

A JSON line for each run, and one for the untrained model: on how many of the listings its note names 0, 1, 2, 3 and 4
facts (`notes_by_facts_named`), and the first five listings, each with note and answer.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cory.run.folder import read_rows

from .make import FACTS, QUESTIONS, flats_of
from .metrics import names

FIRST = 5


def of_responses(file: Path) -> Iterator[dict[str, Any]]:
    """The line of each note-taker of an evaluation: a run's first agent, or the untrained model."""
    flats = flats_of("fresh")
    notes: dict[str, list[str]] = {}
    answers: dict[str, list[str]] = {}
    for row in read_rows(file):
        model, text = row["model"], row["completions"][0].strip()
        if row["role"] == "note_taker":
            notes.setdefault(model, []).append(text)
        else:
            answers.setdefault(row["read"], []).append(text)
    for model in notes:
        run, _, agent = model.partition("/")
        if agent in ("", "agent_1"):
            yield {"run": run, **of_notes(flats, notes[model], answers[model])}


def of_notes(
    flats: Sequence[dict[str, str]], notes: Sequence[str], answers: Sequence[str]
) -> dict[str, Any]:
    """How many facts the notes name, and the first of them. All sequences are in the order of the flats."""
    named = Counter(
        sum(names(note, flat[fact]) for fact in FACTS)
        for flat, note in zip(flats, notes, strict=True)
    )
    first = [
        {
            "listing": flat["listing"],
            "note": note,
            "question": QUESTIONS[flat["asked"]],
            "answer": answer,
            "right": flat[flat["asked"]],
        }
        for flat, note, answer in zip(flats, notes, answers, strict=True)
    ][:FIRST]
    counts = [named[number] for number in range(len(FACTS) + 1)]
    return {"notes_by_facts_named": counts, "first": first}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for line in of_responses(Path(name)):
            print(json.dumps(line))
