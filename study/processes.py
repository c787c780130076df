"""Processes that an experiment starts: none outlives it."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # Linux: prctl(2)


def die_with_parent() -> None:
    """In a new process: end it when its parent is killed, so that the run is free for another worker to resume."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
