"""Signals end a run after the iteration in which they come."""

import os
import signal
import stat
import sys
import threading
from types import FrameType
from typing import Any


class Interrupted(SystemExit):
    """Ends the run after a signal, once its state is saved; the exit status is 128 + the signal's number."""


class Signals:
    """In this context, the first SIGTERM, SIGINT or SIGHUP is only recorded in `received`; a second
    ends the process.

    A terminal that closes sends SIGHUP, and often twice, so one that comes second is passed over.
    Under `nohup` SIGHUP stays ignored.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        # Python lets no other set handlers.
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
        if number == signal.SIGHUP:
            mute()
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


def mute() -> None:
    """The terminal is gone, or who reads the pipe: from now on what is printed goes nowhere, but into files."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if not stat.S_ISREG(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)
    os.close(nowhere)
