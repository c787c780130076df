"""Shards policies over processes, layer by layer, with PyTorch's FSDP2, if `parallel.shard` asks for it.

Each process computes with full layers, which are gathered before use and dropped afterwards. All processes must
therefore run equally many passes, whatever their prompts and responses are.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import TypeVar

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from cory.config import ParallelConfig
from cory.parallel import distributed

W = TypeVar("W", bound=nn.Module)


def split(wrapped: W, parallel: ParallelConfig, precision: str = "fp32") -> W:
    """Shards a wrapped policy in place, if `parallel.shard` asks for it and it is not sharded yet.

    Args:
        precision: `bf16` gathers and computes layers in bfloat16, and reduces gradients in float32.
    """
    if parallel.shard == "none":
        return wrapped
    policy: nn.Module = wrapped.pretrained_model  # type: ignore[assignment]
    mixed_precision = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if precision == "bf16"
        else MixedPrecisionPolicy()
    )
    shard = partial(fully_shard, mesh=_mesh(), reshard_after_forward=True)
    if not is_sharded(policy):  # LoRA agents share a policy
        names = getattr(policy, "_no_split_modules", None) or ()
        layers = [module for module in policy.modules() if type(module).__name__ in names]
        for layer in reversed(layers):  # inner layers first
            shard(layer, mp_policy=mixed_precision)
        shard(policy, mp_policy=mixed_precision)
    # The value head is sharded separately, as sampling calls only the policy.
    for child in wrapped.children():
        if child is not policy and not is_sharded(child):
            shard(child)
    wrapped._is_accelerate_prepared = True  # type: ignore[assignment]  # else accelerate wraps it in DDP
    return wrapped


@cache
def _mesh() -> DeviceMesh:
    return init_device_mesh(PartialState().device.type, (distributed.world_size(),))


def is_sharded(model: nn.Module) -> bool:
    """Whether a policy is sharded over processes."""
    return isinstance(model, FSDPModule)


def placed(wrapped: W, device: torch.device) -> W:
    """Moves a wrapped policy to the device, unless it is sharded."""
    return wrapped if any(map(is_sharded, wrapped.children())) else wrapped.to(device)


def device_of(model: nn.Module) -> torch.device:
    """Returns the device on which a policy computes."""
    return next(model.parameters()).device


@contextmanager
def gathered(policy: nn.Module) -> Iterator[None]:
    """Keeps the full policy in memory within the context, so that processes may run different numbers of passes.

    Passes must be without gradient.
    """
    if not isinstance(policy, FSDPModule):
        yield
        return
    policy.set_reshard_after_forward(False)
    # The first pass would do this, too, unless it bypasses the outermost module, as `generate` does with LoRA.
    policy.unshard()
    yield
    policy.set_reshard_after_forward(True)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def all_reduce_min(value: int) -> int:
    """Returns the minimum of a number over all processes."""
    return -int(distributed.all_reduce_max(-value))


def whole(tensor: Tensor) -> Tensor:
    """Gathers a tensor from all processes, which must all call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns full tensors in the main process's memory, {} in others. All processes must call this.

    Names of one tensor share its copy, so tied weights stay tied.
    """
    gathered = {}
    copies: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in copies:
            full_tensor = whole(tensor.detach())
            copies[id(tensor)] = (
                full_tensor.cpu() if distributed.is_main() else full_tensor.new_empty(0)
            )
        gathered[name] = copies[id(tensor)]
    return gathered if distributed.is_main() else {}


def part_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Moves a full tensor to the device of `other`; if `other` is sharded, returns this process's shard."""
    tensor = tensor.to(other.device)
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def whole_weights(policy: nn.Module, name: str = "") -> dict[str, Tensor]:
    """Returns a policy's full weights whose names contain `name`, in the main process's memory; {} in others."""
    weights = policy.state_dict(keep_vars=True)
    return gathered_tensors({key: tensor for key, tensor in weights.items() if name in key})
