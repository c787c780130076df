"""Converts trained weights and optimizer state to a checkpoint's tensors and back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from cory.parallel.sharding import part_like


def tensors_of(trained: Mapping[str, Parameter], optimizer: Any) -> dict[str, Tensor]:
    """Returns trained weights and their optimizer state as named tensors."""
    tensors = {}
    for name, parameter in trained.items():
        tensors[f"weights/{name}"] = parameter.detach().contiguous()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{name}/{key}"] = value.contiguous()
    return tensors


def load_tensors(
    tensors: Mapping[str, Tensor], trained: Mapping[str, Parameter], optimizer: Any
) -> None:
    """Restores the result of `tensors_of`.

    Raises a ValueError, and changes nothing, if a weight is missing or does not fit.
    """
    state_keys: dict[str, list[str]] = {name: [] for name in trained}
    for key in tensors:
        kind, name, *_ = key.split("/")
        if name not in trained:
            raise ValueError(f"{key}: expected a trained parameter's tensor, got an unknown name")
        if kind == "optimizer":
            state_keys[name].append(key)
    for name, parameter in trained.items():
        saved = tensors.get(f"weights/{name}")
        if saved is None or saved.shape != parameter.shape or saved.dtype != parameter.dtype:
            got = None if saved is None else (tuple(saved.shape), saved.dtype)
            raise ValueError(
                f"{name}: expected {(tuple(parameter.shape), parameter.dtype)}, got {got}"
            )
    optimizer.state.clear()
    for name, parameter in trained.items():
        parameter.detach().copy_(part_like(tensors[f"weights/{name}"], parameter))
        state: dict[str, Tensor] = {}
        for key in state_keys[name]:
            kind = key.rsplit("/", 1)[1]
            state[kind] = part_like(tensors[key], parameter)
        if state:
            optimizer.state[parameter] = state
