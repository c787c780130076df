"""Collective operations between processes; with a single process, they return their input.

Each process holds all agents, whole or sharded, and answers its share of the queries. Processes do not exchange
errors: a process that fails exits with its traceback, and the launcher ends the others.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState

from cory.config import Config
from cory.errors import UserError

# How long a process waits for the others before it gives up.
TIME_LIMIT = timedelta(minutes=20)
T = TypeVar("T")


def start(device: torch.device) -> None:
    """Starts the process group if torchrun or accelerate has launched several processes.

    Call this before any other use of accelerate; otherwise each process assumes that it is the only one.

    Args:
        device: this process's device.

    Raises a UserError if there are several processes and this one already uses another kind of device, or if an
    environment variable of torchrun has an invalid value.
    """
    try:
        state = PartialState(cpu=device.type == "cpu", timeout=TIME_LIMIT)
    except ValueError as error:  # due to MASTER_PORT, WORLD_SIZE, ...
        raise UserError(f"processes: expected the environment of torchrun, got: {error}") from None
    if state.num_processes > 1 and state.device.type != device.type:
        raise UserError(
            f"device: expected {state.device}, got {str(device)!r}. This process already uses {state.device}"
        )
    state.device = device
    if device.type == "cuda":
        torch.cuda.set_device(device)


def check(config: Config) -> None:
    """Raises a UserError if the settings do not fit the number of processes or the launcher."""
    kind = PartialState().distributed_type.value
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":  # accelerate looks at it later
        kind = "FSDP"
    if kind in ("DEEPSPEED", "FSDP"):
        raise UserError(
            f"accelerate: expected plain data parallelism (configs/accelerate/), got {kind}, whose engine cannot serve "
            "two agents in one process. To shard agents over processes, set parallel.shard: full."
        )
    # Set by `accelerate launch`. Its mixed precision would apply only to the policy's passes in an update.
    mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed_precision != "no":
        raise UserError(
            f"accelerate: expected mixed_precision: no, got {mixed_precision}. Use --precision bf16, which also covers "
            "sampling and the reference."
        )
    processes = world_size()
    if config.device_per_agent and processes > 1:
        raise UserError(
            f"agents[0].device: expected null with {processes} processes, "
            f"got {config.agents[0].device!r}"
        )
    mini_batch_size = config.ppo.mini_batch_size
    if mini_batch_size % processes:
        raise UserError(
            f"ppo.mini_batch_size: expected a multiple of {processes}, the number of processes, got {mini_batch_size}"
        )
    config.check_batch(processes)
    if config.parallel.shard == "full":
        _check_sharding(config, processes)


def _check_sharding(config: Config, processes: int) -> None:
    if processes == 1:
        raise UserError(
            "parallel.shard: expected none in a single process, got 'full'. Start several processes with torchrun"
        )
    for index in range(config.cory.num_agents):
        settings = config.of_agent(index)
        bits = settings.model.quantization
        if bits != "none":
            raise UserError(
                f"model.quantization: expected none with parallel.shard: full, got {bits!r}"
            )


def world_size() -> int:
    """The number of processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's rank, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this process writes the run's files."""
    return rank() == 0


def barrier() -> None:
    """Waits until all processes have reached this point."""
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor over all processes."""
    if world_size() == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def all_reduce_max(value: float) -> float:
    """Returns the maximum of a number over all processes."""
    if world_size() == 1:
        return value
    largest = torch.tensor(float(value), device=PartialState().device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def gather_rows(rows: Sequence[T]) -> list[T]:
    """Returns the rows of all processes, in the order of their ranks."""
    by_rank = [list(rows)] * world_size()
    if len(by_rank) > 1:
        dist.all_gather_object(by_rank, list(rows))
    return [row for rank_rows in by_rank for row in rank_rows]


def broadcast_object(value: T | None) -> T:
    """Returns the main process's value on all processes; the other processes' values are ignored."""
    values = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]  # type: ignore[return-value]


def share_of_rows(rows: int) -> slice:
    """Returns the slice of `rows` rows that this process takes; all processes take equally many."""
    share = rows // world_size()
    return slice(rank() * share, (rank() + 1) * share)


def even(rows: int) -> int:
    """Rounds `rows` down to a multiple of the number of processes, so that all run equally many batches."""
    return rows - rows % world_size()
