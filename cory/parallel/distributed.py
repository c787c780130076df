"""Several processes: collective operations, which do nothing in a single one.

With data parallelism each process holds all agents, whole or sharded, and answers its part of the queries:
`world_size`, `all_reduce_sum`, `gather` and `shard` are about these parts. Where agents live apart, each answers all
queries with its own agents, and they find a single process. The other functions are about all processes of the run.

What happens to an error of one process:

1. Work in which processes do not wait for each other (rewards, callbacks, files) runs in `agreed`. All processes tell
   each other how it went. The one that failed raises its own error, the others a `FailedElsewhere` that quotes it.
2. An update exchanges gradients, from which all processes see alike whether it is finite: each raises its `NotFinite`
   (`updated`).
3. Any other error is raised in its process alone. That process ends; torchrun then ends the others, which wait for it
   in vain.

`raised_everywhere` tells the first two from the third. `CoryTrainer.train` sees all three. If the error is everywhere,
and no agent has changed since the iteration began, the processes save a checkpoint together
(`Checkpoints.saved_on_error`). Then each says what is saved and how to continue (`CoryTrainer._explaining_errors`), and
the script ends with a message and status 2, or a traceback (`cory.cli.settings.main`).
"""

import ctypes
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object, reduce

from cory.config import Config, ParallelConfig
from cory.errors import NotFinite, RewardError, UserError, expect

TIME_LIMIT = timedelta(minutes=20)  # that a process waits for the others before it takes them for dead
NOT_SHARDED = ("Adafactor", "Muon", "Rprop")  # optimizers of torch that cannot step on sharded weights
T = TypeVar("T")
parallel = ParallelConfig()  # of the run of this process


class Failure(NamedTuple):
    """What processes tell each other of an error: its text, and whether a reward function is to blame."""

    text: str
    of_reward: bool

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """The report on an error; one that is not meant for users is named by its class, too."""
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return cls(f"{kind}{error}", isinstance(error, RewardError))


class FailedElsewhere(UserError):
    """An error of another process, by its number, raised here too."""

    def __init__(self, process: int, failure: Failure) -> None:
        super().__init__(f"process {process} failed ({failure.text})")
        self.of_reward = failure.of_reward


def start(cpu: bool, settings: ParallelConfig | None = None) -> PartialState:
    """The processes' common state. The first call decides on `cpu`.

    Call this before any other use of accelerate, or each process takes itself for the only one.
    """
    global parallel
    parallel = settings or ParallelConfig()
    if parallel.agents == "apart":
        return _start_apart(cpu)
    # Sums over shards in the host's memory are made there.
    backend = {"backend": "cuda:nccl,cpu:gloo"} if parallel.offload and not cpu and "RANK" in os.environ else {}
    return PartialState(cpu=cpu, timeout=TIME_LIMIT, **backend)


def _start_apart(cpu: bool) -> PartialState:
    """Each process is a single one for accelerate, and so for the learners; texts and numbers go by gloo."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    expect(count > 1, "parallel.agents", "together in a single process, or a start by torchrun", "apart")
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIME_LIMIT)
    with _without("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        state = PartialState(cpu=cpu)
    expect(state.num_processes == 1, "parallel.agents", "together, as this process started that way", "apart")
    if state.device.type == "cuda":
        state.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(state.device)
    return state


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Hides variables of the environment."""
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def check(config: Config) -> None:
    """Raises a UserError if the settings do not fit the processes, or exclude each other across processes."""
    kind, world, size = PartialState().distributed_type.value, world_size(), config.ppo.mini_batch_size
    if kind in ("DEEPSPEED", "FSDP"):
        raise UserError(
            f"accelerate: expected plain data parallelism (configs/accelerate/), got {kind}: two agents in one process "
            "cannot share its engine. parallel.shard: full splits agents over processes."
        )
    expect(size % world == 0, "ppo.mini_batch_size", f"a multiple of the number of processes, {world}", size)
    share, group = config.ppo.batch_size // world, config.chains_per_query
    expect(
        share % group == 0, "ppo.batch_size", f"a multiple of group_size = {group} in each of {world} processes", share
    )
    if config.parallel.agents == "apart":
        several = f"from 2 to cory.num_agents = {config.cory.num_agents} processes"
        expect(run_size() <= config.cory.num_agents, "parallel.agents: apart", several, run_size())
    if config.parallel.shard == "none":
        return
    expect(world > 1, "parallel.shard", "none in a single process, or a start by torchrun", "full")
    on_gpu = PartialState().device.type != "cpu"
    expect(on_gpu or not config.parallel.offload, "parallel.offload", "false on a CPU", True)
    optimizer, others = config.ppo.optimizer, f"none of {', '.join(NOT_SHARDED)} with parallel.shard: full"
    expect(optimizer not in NOT_SHARDED, "ppo.optimizer", others, optimizer)
    for own in map(config.of_agent, range(config.cory.num_agents)):
        bits = own.model.quantization
        expect(bits == "none", "model.quantization", "none with parallel.shard: full", bits)
        expect(not own.lora.merge, "lora.merge", "false with parallel.shard: full", True)


def configure_cpu() -> None:
    """Sets the CPU's arithmetic and memory for training.

    Numbers below 1e-38 count as 0: many of them make PyTorch's GELU take six times as long. Freed memory stays with the
    process (glibc): else the pages of every large array go back to the system and are asked for again. Where agents are
    sharded they do go back, to save memory: layers come and go, and what is freed between them would not be used again.
    """
    torch.set_flush_denormal(True)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and parallel.shard == "full":
        mallopt(-3, 2**18)  # M_MMAP_THRESHOLD: every array from 256 KiB on gets pages of its own
    elif mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no array gets pages of its own
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def world_size() -> int:
    """The number of processes that share each batch."""
    return PartialState().num_processes


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over the processes that share each batch."""
    return reduce(tensor, "sum") if world_size() > 1 else tensor


def gather(rows: list[Any]) -> list[Any]:
    """The lists of all processes that share each batch, one after the other."""
    return gather_object(rows) if world_size() > 1 else rows


def shard(rows: int) -> slice:
    """This process's slice of `rows`, a multiple of the number of processes that share each batch."""
    part, index = rows // world_size(), PartialState().process_index
    return slice(index * part, (index + 1) * part)


def even(rows: int) -> int:
    """At most `rows`, and equally many for each process that shares them, so that all run equally many batches."""
    return rows - rows % world_size()


def run_size() -> int:
    """The number of all processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's number among all of the run."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this process writes the run's files."""
    return rank() == 0


def all_reduce_max(value: float) -> float:
    """The largest of a number over all processes."""
    if run_size() == 1:
        return value
    device = "cpu" if parallel.agents == "apart" else PartialState().device
    largest = torch.tensor(float(value), device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def everyone(value: T) -> list[T]:
    """A value from each process, in all of them."""
    values = [value] * run_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def broadcast(value: Any, source: int = 0) -> Any:
    """The value of one process, by default the main one's."""
    values = [value]
    if run_size() > 1:
        dist.broadcast_object_list(values, source)
    return values[0]


def agreed(compute: Callable[[], T]) -> T:
    """`compute()`, in which processes do not wait for each other. An error of one is raised in all of them.

    All processes must call this, and equally often. The one that failed raises its own error, the others a
    FailedElsewhere that quotes it.
    """
    if run_size() == 1:
        return compute()
    value: T | None = None
    failure: Exception | None = None
    try:
        value = compute()
    except Exception as error:
        failure = error
    reports = everyone(None if failure is None else Failure.of(failure))
    if failure is not None:
        raise _everywhere(failure)
    for number, report in enumerate(reports):
        if report is not None:
            raise FailedElsewhere(number, report)
    return value  # type: ignore[return-value]


def updated(compute: Callable[[], T]) -> T:
    """`compute()`, which updates agents. A NotFinite is raised in all processes, other errors where they occur.

    Processes that share an agent exchange its gradients there, and decide by what they have exchanged whether an update
    is finite. After another error, such as memory that runs out in one of them, the others wait for gradients, not for
    news. So that process ends, and with it the run.
    """
    if parallel.agents == "apart":  # each updates its own agents, without the others
        return agreed(compute)
    try:
        return compute()
    except NotFinite as error:
        _everywhere(error)
        raise


def _everywhere(error: Exception) -> Exception:
    """The error, marked as one that all processes have or are told of."""
    error.everywhere = True  # type: ignore[attr-defined]
    return error


def raised_everywhere(error: Exception) -> bool:
    """Whether all processes have this error, or one that another process told them of. False: this one is alone."""
    return run_size() == 1 or isinstance(error, FailedElsewhere) or getattr(error, "everywhere", False)


def computed_by(owner: int, compute: Callable[[], T]) -> T:
    """`compute()`, where agents live apart by process `owner` alone, which hands on the state of its random streams.

    So all of them go on as a single process would.
    """
    if parallel.agents != "apart":
        return agreed(compute)
    mine = rank() == owner
    made = agreed(lambda: (compute(), _random_state()) if mine else None)
    value, state = broadcast(made, owner)
    if not mine:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
        if state[3] is not None:
            torch.cuda.set_rng_state(state[3])
    return value


def _random_state() -> tuple[Any, ...]:
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_gpu


def merged(values: list[T | None]) -> list[T]:
    """A list of which, where agents live apart, each process has some values, and None for the others: all of them."""
    if parallel.agents == "apart":
        for others in everyone(values):
            values = [other if value is None else value for value, other in zip(values, others, strict=True)]
    return values  # type: ignore[return-value]
