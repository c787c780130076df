"""How long the phases of an iteration take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the seconds that its body takes to those of the phase."""
    started = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # else the time of queued work would count for the next phase
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started
