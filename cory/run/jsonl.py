"""JSON Lines files, which are appended to by whole lines."""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cory.errors import UserError


def read_rows(path: Path, length: int | None = None) -> list[dict[str, Any]]:
    """The lines of a JSON Lines file, or of its first bytes. Raises a UserError if one is not a JSON object."""
    try:
        rows = [
            json.loads(line) for line in path.read_bytes()[:length].decode("utf-8").splitlines()
        ]
    except ValueError as error:
        raise UserError(f"{path}: expected lines of json ({error})") from None
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: expected lines of json objects")
    return rows


class JsonlWriter:
    """Appends whole lines to a JSON Lines file, in a folder that this process has locked."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "ab", buffering=0)
        self.path = path
        self.length = path.stat().st_size
        self.waiting = b""  # lines that could not be written yet

    def cut(self, length: int) -> None:
        """Keeps the first `length` bytes."""
        self.file.truncate(length)
        self.length = length

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends lines. If the disk is full, warns and keeps them for the next call."""
        self.waiting += "".join(json.dumps(row, default=str) + "\n" for row in rows).encode()
        try:
            self._write()
        except OSError as error:
            warnings.warn(
                f"{self.path} could not be written ({error}); its lines are kept for later.",
                stacklevel=3,
            )

    def _write(self) -> None:
        try:
            rest = memoryview(self.waiting)
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError:
            self.file.truncate(self.length)
            raise
        self.length += len(self.waiting)
        self.waiting = b""

    def flushed(self) -> int:
        """Flushes the file to the disk and returns its length. Raises OSError if that fails."""
        self._write()
        os.fsync(self.file.fileno())
        return self.length

    def close(self) -> None:
        """Writes pending lines, if possible, and closes the file."""
        with suppress(OSError):
            self._write()
        self.file.close()
