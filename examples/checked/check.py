"""Runs between two calls: checks the pioneer's calculations and adds corrections to the observer's prompt."""

import re

from cory.roles import fill
from gsm8k_train.config import OBSERVER

CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)(?![\d/])")


def corrections(text: str) -> list[str]:
    """Returns a correction for each wrong `a op b = c` in a text; quotients that are not whole numbers are skipped.

    >>> corrections("Anna buys 12 * 7 = 94 shells. Now 94 - 4 = 90.")
    ['12 * 7 = 84, not 94.']
    """
    messages = []
    for left, operator, right, result in CALCULATION.findall(text):
        a, b = int(left), int(right)
        if operator == "/" and (b == 0 or a % b):
            continue
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[operator]
        if value != int(result):
            messages.append(f"{left} {operator} {right} = {value}, not {result}.")
    return messages


def checked(row: dict[str, str], responses: dict[str, str]) -> str:
    """Returns the observer's usual prompt, with corrections after the pioneer's solution."""
    solution = responses["pioneer"]
    return fill(OBSERVER, {**row, "response": " ".join([solution, *corrections(solution)])})
