"""Chooses devices by name, configures their arithmetic, and runs work on several devices at the same time.

An agent and its learner compute on the device that `cory/build.py` gives the agent. A sharded policy computes on its
process's device (`sharding.device_of`). Token ids of rollouts stay on the CPU.
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
NAMES = r"cpu|cuda(:(0|[1-9]\d?))?"  # pattern of device names


def choose_device(name: str) -> torch.device:
    """Returns the device called `name`. Raises a UserError if this machine has no such device.

    `auto` is a CUDA GPU if there is one, else the CPU. With several processes, each gets its own GPU.
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
            f"device: expected a device of this machine, got {name!r}. The machine has {gpus} GPUs"
        )
    return device


def _gpu_of_process(device: torch.device, gpus: int) -> torch.device:
    """Returns this process's GPU: the one with its local rank, if a machine runs several processes.

    Raises a UserError if several processes would share a GPU.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes > 1 and device.index is not None:
        raise UserError(
            f"device: expected auto or cuda with {processes} processes on this machine, got {str(device)!r}. Each "
            "process uses its own GPU"
        )
    # torchrun --virtual-local-rank shows each process only its own GPU, and sets LOCAL_RANK to 0.
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if processes > 1 and number >= gpus:
        raise UserError(
            f"device: expected at most {gpus} processes (--nproc_per_node), one per GPU, got {processes}"
        )
    return torch.device("cuda", number if device.index is None else device.index)


def machine_name(device: torch.device) -> str:
    """Returns the name of the GPU, or of the CPU with its widest vector instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    instructions = torch.backends.cpu.get_cpu_capability()
    # Native bf16 instructions speed up training in bf16; torch's name does not mention them.
    if "avx512_bf16" in _cpuinfo("flags"):
        instructions += "-BF16"
    return f"{processor()}, {instructions}"


def processor() -> str:
    """Returns the CPU's name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    """Returns an entry of Linux's /proc/cpuinfo, or an empty string if there is none."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else []:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Returns the autocast context for a model's passes; `bf16` rounds weights and activations to bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def configure(device: torch.device, sharded: bool = False) -> None:
    """Configures this process's arithmetic and memory for `device`; call it before loading models.

    Args:
        sharded: whether the agents are sharded over processes.
    """
    if device.type == "cpu":
        _configure_cpu(sharded)
    # cuDNN's attention, torch's first choice on an H100, has wrong gradients with a mask
    # (https://github.com/pytorch/pytorch/issues/196678). It also builds a new plan for each length of a growing cache.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 matrix products on GPUs that support them


def _configure_cpu(sharded: bool) -> None:
    """Flushes denormal numbers to 0, and tunes glibc's memory allocation.

    Denormals, below 1e-38, can make PyTorch's GELU six times slower. Freed memory stays with the process, since
    returning the pages of every large array to the system and requesting them again takes time. With sharded agents,
    the pages are returned: layers are gathered and dropped all the time, and their freed memory would not be reused.
    """
    torch.set_flush_denormal(True)  # threads started later inherit this
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    if sharded:
        mallopt(-3, 2**18)  # M_MMAP_THRESHOLD: arrays of 256 KiB or more get their own pages
    else:
        mallopt(-4, 0)  # M_MMAP_MAX: no array gets its own pages
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error reports that a device, or one of its libraries, is out of memory."""
    return should_reduce_batch_size(error) or any(
        text in str(error) for text in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Moves a tensor to `device`. Copies from the CPU use page-locked memory, so that the program does not wait."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def at_the_same_time(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Runs `calls` in parallel and returns their results.

    Each call runs in a thread with its share of the CPU's cores. The threads run in parallel because PyTorch releases
    Python's global lock. All calls finish even if one fails. Raises the first error in the order of `calls`, with the
    others as notes.
    """
    cores = torch.get_num_threads()
    share = max(1, cores // len(calls))
    # set_num_threads acts on the thread that calls it, so this thread keeps its number of cores.
    with ThreadPoolExecutor(
        len(calls), initializer=torch.set_num_threads, initargs=(share,)
    ) as pool:
        futures = [pool.submit(call) for call in calls]
    # Threads started later, however, inherit the number that was set last.
    torch.set_num_threads(cores)

    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"At the same time: {type(other).__name__}: {other}")
        raise errors[0]
    return [future.result() for future in futures]
