"""Files that are never partly written: replaced atomically, or appended to by whole lines. And disks that are full."""

import errno
import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cory.config import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


FULL = (errno.ENOSPC, errno.EDQUOT)  # no space on the disk, or none for this user


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that the disk is full; safetensors and tokenizers say it in the text alone."""
    in_text = any(f"(os error {number})" in str(error) for number in FULL)
    return in_text or (isinstance(error, OSError) and error.errno in FULL)


def is_not_written(error: BaseException) -> bool:
    """Whether an error is one of writing files, for whatever reason."""
    return isinstance(error, OSError) or "(os error " in str(error)


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically. If that fails, the file is as it was, and nothing is left beside it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def replace_folder(partial: Path, target: Path) -> None:
    """Moves a folder that is written completely to its place; one that is there is removed after that."""
    for file in partial.iterdir():
        _flush(file)
    _flush(partial)
    aside = target.with_name(f".replaced-{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    partial.rename(target)
    _flush(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rows(path: Path, length: int | None = None) -> list[dict[str, Any]]:
    """The lines of a JSON Lines file, or of its first bytes. Raises a UserError if one is not a JSON object."""
    try:
        rows = [json.loads(line) for line in path.read_bytes()[:length].decode("utf-8").splitlines()]
    except ValueError as error:
        raise UserError(f"{path}: expected lines of json ({error})") from None
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: expected lines of json objects")
    return rows


class JsonlWriter:
    """Appends whole lines to a JSON Lines file.

    Raises a UserError if another process has it open as a JsonlWriter.
    """

    def __init__(self, path: Path) -> None:
        self.file = open(path, "ab", buffering=0)
        try:  # released by the system however the process ends; without effect on file systems that know no locks
            if fcntl:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise UserError(
                f"output: expected a run that no other process is writing, got {str(path.parent)!r}, in which one has "
                f"{path.name} open. Wait for it, stop it, or name another folder with --output"
            ) from None
        except OSError:
            pass
        self.path, self.length, self.waiting = path, path.stat().st_size, b""

    def cut(self, length: int) -> None:
        """Keeps the first `length` bytes."""
        self.file.truncate(length)
        self.length = length

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends lines. If the disk is full, warns and keeps them for the next call."""
        self.waiting += "".join(json.dumps(row) + "\n" for row in rows).encode()
        try:
            self._write()
        except OSError as error:
            warnings.warn(f"{self.path} could not be written ({error}); its lines are kept for later.", stacklevel=3)

    def _write(self) -> None:
        try:
            rest = memoryview(self.waiting)
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError:
            self.file.truncate(self.length)
            raise
        self.length, self.waiting = self.length + len(self.waiting), b""

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
