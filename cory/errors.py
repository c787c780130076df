"""Errors that the user can fix, and helpers for their messages."""

from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """An error that the user can fix, shown without traceback.

    Its message names the place, what was expected, and what was found.
    """


def one_of(where: str, names: Sequence[str], value: Any) -> None:
    """Raises a UserError if `value` is not one of `names`.

    Functions that branch on a name call this first. Without it, their last branch would accept any unknown name.
    """
    if value not in names:
        raise UserError(f"{where}: expected one of {', '.join(names)}, got {value!r}")


class NotFinite(UserError):
    """A loss or gradient is not finite. The weights keep the values that they had before this optimizer step."""


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun; the noun gets an s unless the count is 1.

    >>> counted(1, "iteration"), counted(3, "iteration")
    ('1 iteration', '3 iterations')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
