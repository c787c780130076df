"""A process whose terminal may close. Importing this does not import torch."""

import signal
import sys
from contextlib import suppress
from typing import Any, TextIO

# What a closing terminal sends; None on Windows, which does not have it.
HANGUP: int | None = getattr(signal, "SIGHUP", None)


class _Lenient:
    """A stream to which writing does not fail, whatever becomes of it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def heeds_hangup() -> bool:
    """Whether SIGHUP would end this process: it exists and is not ignored, as it is under `nohup`."""
    return HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN


def outlive(only_terminals: bool = False) -> None:
    """From now on prints do not raise, as they would once the terminal is gone.

    `only_terminals`: a file or a pipe stays as it is, so that its errors are heard.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, _Lenient) or (only_terminals and not stream.isatty()):
            continue
        setattr(sys, name, _Lenient(stream))
