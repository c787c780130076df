"""Processes that an experiment starts: none outlives it, and each has its share of the cores."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # Linux: prctl(2)


def of_threads(count: int) -> dict[str, str]:
    """The environment of a process that computes with so many threads."""
    return os.environ | {"OMP_NUM_THREADS": str(count)}


def die_with_parent() -> None:
    """In a new process: end it when its parent is killed, so that the run is free for another worker to resume."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
