"""Metrics for credit.yaml, two for each fact. If it is asked for: does the note name it, and is the answer right?"""

import re
from collections.abc import Callable

from .make import QUESTIONS

Values = list[float | None]


def is_named(note: str, value: str) -> bool:
    """Whether a note holds a fact; a street's name is enough."""
    return bool(re.search(rf"\b{value.removesuffix(' Street')}\b", note, re.IGNORECASE))


def _named(fact: str) -> Callable[..., Values]:
    """Makes a metric: 1.0 if a note holds the fact, otherwise 0.0. Answers, and notes for other questions, get None."""

    def metric(
        prompts: list[str],
        completions: list[str],
        role: list[str],
        question: list[str],
        answer: list[str],
        **columns,
    ) -> Values:
        values: Values = []
        for text, who, asked, right in zip(completions, role, question, answer, strict=True):
            if who != "note_taker" or asked != QUESTIONS[fact]:
                values.append(None)
                continue
            values.append(float(is_named(text, right)))
        return values

    return metric


def _right(fact: str) -> Callable[..., Values]:
    """Makes a metric: an answer's reward if the question is about the fact. Notes and other answers get None."""

    def metric(
        prompts: list[str],
        completions: list[str],
        rewards: list[float],
        role: list[str],
        question: list[str],
        **columns,
    ) -> Values:
        rows = zip(rewards, role, question, strict=True)
        return [
            value if who == "answerer" and asked == QUESTIONS[fact] else None
            for value, who, asked in rows
        ]

    return metric


named_street, named_rooms, named_rent, named_pets = map(_named, QUESTIONS)
right_street, right_rooms, right_rent, right_pets = map(_right, QUESTIONS)
