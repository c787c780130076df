"""How long the phases of an iteration take, and how much memory a process has used."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the seconds that its body takes to those of the phase."""
    started = time.perf_counter()
    yield
    for gpu in _gpus_in_use():
        torch.cuda.synchronize(gpu)  # else the time of queued work would count for the next phase
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started


def peak_memory_mb() -> float:
    """Peak memory so far, in MiB: of the fullest GPU if CUDA is used, else of the process."""
    gpus = _gpus_in_use()
    if gpus:
        return max(map(torch.cuda.max_memory_allocated, gpus)) / 2**20
    if resource is None:
        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss) / 2**20  # bytes; only Windows has the peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _gpus_in_use() -> list[int]:
    """The GPUs on which this process has allocated memory. Asking the others would take memory of theirs."""
    if not torch.cuda.is_initialized():
        return []
    return [gpu for gpu in range(torch.cuda.device_count()) if torch.cuda.max_memory_allocated(gpu)]
