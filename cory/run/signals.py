"""Signals end a run after the iteration in which they come."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from cory.cli import terminal


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
            if terminal.heeds_hangup():
                numbers.append(signal.SIGHUP)
                # A terminal is gone before its signal comes, and a progress bar keeps the stream it began with.
                terminal.outlive(only_terminals=True)
            self.before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == terminal.HANGUP:
            terminal.outlive()
        if self.received is not None:
            if number == terminal.HANGUP:
                return
            os._exit(128 + number)
        self.received = number
        name = signal.Signals(number).name
        print(
            f"\n{name}: finishing this iteration, then saving. Repeat to stop now.",
            file=sys.stderr,
            flush=True,
        )
