"""Collective operations for data-parallel training, one process per GPU or CPU share; no-ops in a single process."""

import ctypes
import sys
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, reduce

TIME_LIMIT = timedelta(minutes=20)  # that a process waits for the others before it takes them for dead


def start(cpu: bool) -> PartialState:
    """The processes' common state. The first call decides on `cpu`.

    Call this before any other use of accelerate, or each process takes itself for the only one.
    """
    return PartialState(cpu=cpu, timeout=TIME_LIMIT)


def configure_cpu() -> None:
    """Sets the CPU's arithmetic and memory for training.

    Numbers below 1e-38 count as 0: many of them make PyTorch's GELU take six times as long. Freed memory stays with the
    process (glibc): else the pages of every large array go back to the system and are asked for again.
    """
    torch.set_flush_denormal(True)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no array gets pages of its own
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def world_size() -> int:
    """The number of processes that train together."""
    return PartialState().num_processes


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over the processes."""
    return reduce(tensor, "sum") if world_size() > 1 else tensor


def all_reduce_max(value: float) -> float:
    """The largest of a number over the processes."""
    return max(gather([value]))


def gather(rows: list[Any]) -> list[Any]:
    """The lists of all processes, one after the other."""
    return gather_object(rows) if world_size() > 1 else rows


def broadcast(value: Any) -> Any:
    """The main process's value."""
    return broadcast_object_list([value])[0] if world_size() > 1 else value


def shard(rows: int) -> slice:
    """This process's slice of `rows`, a multiple of the number of processes."""
    part, index = rows // world_size(), PartialState().process_index
    return slice(index * part, (index + 1) * part)
