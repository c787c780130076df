"""Processes that an experiment starts: none outlives it, and each has its share of the cores and the GPUs."""

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1  # Linux: prctl(2)
_of_thread = threading.local()


def environment(threads: int | None) -> dict[str, str]:
    """The environment of a process: it computes with so many threads, None: as many as it takes, and sees the GPUs of
    the thread that starts it (`take_gpus`), by default all.
    """
    changes = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    gpus = getattr(_of_thread, "gpus", None)
    if gpus is not None:
        changes["CUDA_VISIBLE_DEVICES"] = gpus
    return os.environ | changes


def take_gpus(gpus: str | None) -> None:
    """Makes these GPUs, as CUDA_VISIBLE_DEVICES names them, those of the processes that this thread starts."""
    _of_thread.gpus = gpus


def die_with_parent() -> None:
    """In a new process: end it when its parent is killed, so that the run is free for another worker to resume."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
