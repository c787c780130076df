"""Errors that the user can fix."""

from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """An error that the user can fix: the message says what was expected, given and where. Shown without traceback."""


class RewardError(UserError):
    """An error of a reward function: once that is mended, the run continues with `--accept_changes reward`."""


def expect(ok: bool, where: str, expected: str, came: Any) -> None:
    """Raises the UserError "WHERE: expected EXPECTED, got CAME" unless `ok`."""
    if not ok:
        raise UserError(f"{where}: expected {expected}, got {came!r}")


def one_of(where: str, known: Sequence[str], came: Any) -> None:
    """Raises a UserError that lists the known names unless `came` is one of them.

    For functions that take a name: without it, an unknown one would be taken for the last of the known ones.
    """
    expect(came in known, where, f"one of {', '.join(known)}", came)
