"""Errors that the user can fix, and helpers for their messages."""

from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """An error that the user can fix; its message names place, expectation and value. Shown without traceback."""


def one_of(where: str, names: Sequence[str], came: Any) -> None:
    """Raises a UserError that lists `names` unless `came` is one of them.

    Functions that branch on a name call it, as they would otherwise treat an unknown name like the last one.
    """
    if came not in names:
        raise UserError(f"{where}: expected one of {', '.join(names)}, got {came!r}")


class NotFinite(UserError):
    """A loss or gradient is not finite; the weights keep their values from before that optimizer step."""


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, which must have a regular plural.

    >>> counted(1, "iteration"), counted(3, "iteration")
    ('1 iteration', '3 iterations')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
