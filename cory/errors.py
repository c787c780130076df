"""Errors that the user can fix, and counts in messages."""

from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """An error that the user can fix: the message says what was expected, given and where. Shown without traceback."""


def one_of(where: str, names: Sequence[str], came: Any) -> None:
    """Raises a UserError that lists the names unless `came` is one of them.

    For functions that take a name: without it, an unknown one would be taken for the last of them.
    """
    if came not in names:
        raise UserError(f"{where}: expected one of {', '.join(names)}, got {came!r}")


class NotFinite(UserError):
    """A loss or gradient of an update is not finite; the weights are as before that optimizer step."""


def counted(count: int, noun: str) -> str:
    """A count with its noun, which takes a plain plural.

    >>> counted(1, "iteration"), counted(3, "iteration")
    ('1 iteration', '3 iterations')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
