"""Policies split over processes, layer by layer, by PyTorch's FSDP2; without effect on those that
are not.

Each process computes with whole layers, which are put together before they are used and dropped
after. So all processes must run equally many passes, whatever their prompts and responses are.
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
    """Shards a policy in its wrapper, in place, if `parallel.shard` asks for it and it is not
    sharded yet.

    `precision`: with `bf16`, layers are put together and computed in bfloat16, gradients are summed
    in float32.
    """
    if parallel.shard == "none":
        return wrapped
    policy: nn.Module = wrapped.pretrained_model  # type: ignore[assignment]
    half = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if precision == "bf16"
        else MixedPrecisionPolicy()
    )
    shard = partial(fully_shard, mesh=_mesh(), reshard_after_forward=True)
    if not is_sharded(policy):  # LoRA agents may share it
        names = getattr(policy, "_no_split_modules", None) or ()
        layers = [module for module in policy.modules() if type(module).__name__ in names]
        for layer in reversed(layers):  # one within another goes first
            shard(layer, mp_policy=half)
        shard(policy, mp_policy=half)
    # The value head; its own root, as sampling starts at the policy.
    for child in wrapped.children():
        if child is not policy and not is_sharded(child):
            shard(child)
    wrapped._is_accelerate_prepared = True  # type: ignore[assignment]  # accelerate would wrap it for plain data parallelism
    return wrapped


@cache
def _mesh() -> DeviceMesh:
    return init_device_mesh(PartialState().device.type, (distributed.world_size(),))


def is_sharded(model: nn.Module) -> bool:
    """Whether a policy is split over processes."""
    return isinstance(model, FSDPModule)


def placed(wrapped: W, device: torch.device) -> W:
    """A policy in its wrapper on the device; shards are where they have to be."""
    return wrapped if any(map(is_sharded, wrapped.children())) else wrapped.to(device)


def device_of(model: nn.Module) -> torch.device:
    """Where a policy computes."""
    return next(model.parameters()).device


@contextmanager
def gathered(policy: nn.Module) -> Iterator[None]:
    """In this context, processes may run the policy, without gradient, on batches and lengths of
    their own: it is put together in the first pass and kept until the end.
    """
    if not isinstance(policy, FSDPModule):
        yield
        return
    policy.set_reshard_after_forward(False)
    yield
    policy.set_reshard_after_forward(True)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def least(value: int) -> int:
    """The smallest of a number over all processes."""
    return -int(distributed.all_reduce_max(-value))


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from all processes; all of them must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors, put together in the main process's memory; none in the others. All of them must call this."""
    gathered = {}
    for name, tensor in tensors.items():
        together = whole(tensor)
        if distributed.is_main():
            gathered[name] = together.cpu()
    return gathered


def part_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, on the device of `other`, and where that is sharded the part of it that belongs here."""
    tensor = tensor.to(other.device)
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def whole_weights(policy: nn.Module, name: str = "") -> dict[str, Tensor]:
    """A policy's weights with `name` in their names, put together in the main process's memory; none in the others."""
    weights: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}  # tied weights stay tied
    for key, tensor in policy.state_dict(keep_vars=True).items():
        if name in key:
            if id(tensor) not in seen:
                together = whole(tensor.detach())
                seen[id(tensor)] = (
                    together.cpu() if distributed.is_main() else together.new_empty(0)
                )
            weights[key] = seen[id(tensor)]
    return weights if distributed.is_main() else {}
