"""Between two calls: checks the pioneer's calculations, and puts right in the observer's prompt what is wrong."""

import re

from cory.roles import fill
from gsm8k_train.config import OBSERVER

CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)(?![\d/])")


def corrections(text: str) -> list[str]:
    """Each wrong `a op b = c` in a text, with its right result. A quotient that is no whole number has none.

    >>> corrections("Anna buys 12 * 7 = 94 shells. Now 94 - 4 = 90.")
    ['12 * 7 = 84, not 94.']
    """
    found = []
    for left, operator, right, result in CALCULATION.findall(text):
        a, b = int(left), int(right)
        if operator == "/" and (b == 0 or a % b):
            continue
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[operator]
        if value != int(result):
            found.append(f"{left} {operator} {right} = {value}, not {result}.")
    return found


def checked(row: dict[str, str], responses: dict[str, str]) -> str:
    """The observer's usual prompt, with the corrections behind the pioneer's solution."""
    solution = responses["pioneer"]
    return fill(OBSERVER, {**row, "response": " ".join([solution, *corrections(solution)])})
