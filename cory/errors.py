"""Errors that the user can fix."""

from typing import Any


class UserError(Exception):
    """An error that the user can fix: the message says what was expected, given and where. Shown without traceback."""


def expect(ok: bool, where: str, expected: str, came: Any) -> None:
    """Raises the UserError "WHERE: expected EXPECTED, got CAME" unless `ok`."""
    if not ok:
        raise UserError(f"{where}: expected {expected}, got {came!r}")
