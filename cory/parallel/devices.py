"""Devices: which one a name stands for, this process's arithmetic on it, and work on several at
the same time.

An agent and its learner compute on the device of their plan (`cory/build.py`), a sharded policy on
that of its process (`sharding.device_of`). Token ids of rollouts are on the CPU.
"""

import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size

from cory.errors import UserError

T = TypeVar("T")
NAMES = r"cpu|cuda(:(0|[1-9]\d?))?"  # of devices


def choose_device(name: str) -> torch.device:
    """The device that a name stands for. Raises a UserError if there is none of that name on this
    machine.

    `auto` is a CUDA GPU or the CPU. Of several processes each has its own GPU.
    """
    gpus = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    if not re.fullmatch(NAMES, name):
        raise UserError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    device = torch.device(name)
    if device.type == "cuda":
        device = _gpu_of_process(device, gpus)
    if device.type == "cuda" and device.index >= gpus:
        raise UserError(
            f"device: expected a device of this machine, which has {gpus} GPUs, got {name!r}"
        )
    return device


def _gpu_of_process(device: torch.device, gpus: int) -> torch.device:
    """The GPU of this process: of several processes on a machine each has the one of its number.

    Raises a UserError if several processes would share a GPU.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes > 1 and device.index is not None:
        raise UserError(
            f"device: expected auto or cuda with {processes} processes on this machine, of which each has a GPU of its "
            f"own, got {str(device)!r}"
        )
    number = int(os.environ.get("LOCAL_RANK", "0"))  # 0, too, where each process sees its GPU alone
    if processes > 1 and number >= gpus:
        raise UserError(
            f"device: expected at most as many processes as this machine has GPUs, {gpus}, got {processes} "
            "(--nproc_per_node)"
        )
    return torch.device("cuda", number if device.index is None else device.index)


def machine_name(device: torch.device) -> str:
    """Names what computes: the GPU, or the CPU and its widest vector instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    instructions = torch.backends.cpu.get_cpu_capability()
    # Training in bf16 is faster on a CPU that multiplies bf16 numbers itself, which torch's name leaves out.
    if "avx512_bf16" in _cpuinfo("flags"):
        instructions += "-BF16"
    return f"{processor()}, {instructions}"


def processor() -> str:
    """Returns the CPU's name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    """Returns an entry of Linux's /proc/cpuinfo, or an empty text where there is none."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else []:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of a model's passes by `precision`: weights and activations are rounded to bfloat16 in `bf16`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def configure(device: torch.device, sharded: bool = False) -> None:
    """Sets this process's arithmetic and memory for training and sampling on `device`; call it
    before loading models.

    `sharded`: whether the agents are split over processes.
    """
    if device.type == "cpu":
        _configure_cpu(sharded)
    # Attention by cuDNN, torch's first choice on an H100, has wrong gradients where a mask is passed
    # (https://github.com/pytorch/pytorch/issues/196678), and plans anew for each length of a growing cache.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 matrix products on GPUs that have them


def _configure_cpu(sharded: bool) -> None:
    """Numbers below 1e-38 count as 0: many of them make PyTorch's GELU take six times as long.

    Freed memory stays with the process (glibc): else the pages of every large array go back to the
    system and are asked for again. Where agents are sharded they do go back, to save memory: layers
    come and go, and what is freed between them would not be used again.
    """
    torch.set_flush_denormal(True)  # threads that are started later do the same
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    if sharded:
        mallopt(-3, 2**18)  # M_MMAP_THRESHOLD: every array from 256 KiB on gets pages of its own
    else:
        mallopt(-4, 0)  # M_MMAP_MAX: no array gets pages of its own
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that a device, or one of its libraries, has no memory left."""
    return should_reduce_batch_size(error) or any(
        text in str(error) for text in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on `device`; one of the CPU without waiting for it: page-locked memory is read while
    the program goes on.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def at_the_same_time(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What each of `calls` returns, each in a thread with its share of the CPU's cores; PyTorch
    releases Python's lock.

    All of them come to their end, also if one fails. Raises the first error, in the order of
    `calls`; others are noted on it.
    """
    cores = torch.get_num_threads()
    share = max(1, cores // len(calls))
    # The number of threads belongs to the thread that sets it, so this one keeps its own.
    with ThreadPoolExecutor(
        len(calls), initializer=torch.set_num_threads, initargs=(share,)
    ) as pool:
        futures = [pool.submit(call) for call in calls]
    # But threads that are started later take the number that was set last.
    torch.set_num_threads(cores)

    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"At the same time: {type(other).__name__}: {other}")
        raise errors[0]
    return [future.result() for future in futures]
