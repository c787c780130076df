"""Handles signals, so that a run can finish its current iteration and save."""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO


class Interrupted(SystemExit):
    """Ends the run after a signal, once its state is saved; the exit status is 128 + the signal's number."""


class Signals:
    """A context in which a first SIGTERM, SIGINT or SIGHUP is only recorded, in `received`.

    A second signal ends the process. Only a second SIGHUP is ignored, because a closing terminal often sends it twice.
    Under `nohup`, SIGHUP stays ignored.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        # Python allows only the main thread to set handlers.
        if threading.current_thread() is threading.main_thread():
            numbers: list[int] = [signal.SIGTERM, signal.SIGINT]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            self.before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGHUP:
                return
            os._exit(128 + number)
        self.received = number
        name = signal.Signals(number).name
        print(
            f"\n{name}: finishing this iteration, then saving. Repeat to stop now.",
            file=sys.stderr,
            flush=True,
        )


def keep_printing() -> None:
    """Keeps later prints from raising if the terminal, or a pipe's reader such as `head`, is gone."""
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), _Lenient):
            setattr(sys, name, _Lenient(getattr(sys, name)))


class _Lenient:
    """A stream whose writes never fail, even after it is closed."""

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
