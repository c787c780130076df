"""The optimizer of a policy: its state in checkpoints, the schedule of its learning rate."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import get_scheduler

from cory.config import PPOConfig
from cory.errors import UserError
from cory.parallel.sharding import part_like


def make_optimizer(model: torch.nn.Module, ppo: PPOConfig) -> Any:
    """The optimizer of the settings on the trained parameters; fused if supported.

    Raises a UserError if it does not take `ppo.optimizer_options`.
    """
    name = ppo.optimizer
    options = ppo.optimizer_options
    trained = [p for p in model.parameters() if p.requires_grad]
    if name != "SGD" and "foreach" not in options:
        # One kernel instead of one for each operation.
        options = {"fused": all(p.is_floating_point() for p in trained), **options}
    try:
        return getattr(torch.optim, name)(trained, lr=ppo.learning_rate, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        wanted = f"options of torch.optim.{name}"
        raise UserError(
            f"ppo.optimizer_options: expected {wanted}, got {options} ({reason})"
        ) from None


def learning_rate_factor(schedule: str, warmup: int, iterations: int, k: int) -> float:
    """The factor of the learning rate in iteration `k` (from 0), by transformers' schedules, which
    depend on k only.

    `warmup` iterations rise linearly to 1; then `constant`, or `linear` or `cosine` down to 0 after
    the last.
    """
    if schedule == "constant" and not warmup:
        return 1.0
    dummy = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    # The first iteration counts as step 1, so that it trains at all.
    made = get_scheduler(name, dummy, num_warmup_steps=warmup, num_training_steps=iterations + 1)
    return float(made.lr_lambdas[0](k + 1))


def tensors_of(trained: Mapping[str, Parameter], optimizer: Any) -> dict[str, Tensor]:
    """The trained weights, by name, and the optimizer's state of each."""
    tensors = {}
    for name, parameter in trained.items():
        tensors[f"weights/{name}"] = parameter.detach().contiguous()
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:  # SGD without momentum
                tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value).contiguous()
    return tensors


def load_tensors(
    tensors: Mapping[str, Tensor], trained: Mapping[str, Parameter], optimizer: Any
) -> None:
    """Loads what `tensors_of` returned. If a tensor is missing or misfits, raises a ValueError, nothing changed."""
    state_keys: dict[str, list[str]] = {name: [] for name in trained}
    for key in tensors:
        kind, name, *_ = key.split("/")
        if name not in trained:
            raise ValueError(f"unknown tensor {key}")
        if kind == "optimizer":
            state_keys[name].append(key)
    for name, parameter in trained.items():
        saved = tensors.get(f"weights/{name}")
        if saved is None or saved.shape != parameter.shape or saved.dtype != parameter.dtype:
            came = None if saved is None else (tuple(saved.shape), saved.dtype)
            raise ValueError(
                f"expected {(tuple(parameter.shape), parameter.dtype)} for {name}, got {came}"
            )
    optimizer.state.clear()
    # Whether torch itself keeps a parameter's step on its device.
    on_device = any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    for name, parameter in trained.items():
        parameter.detach().copy_(part_like(tensors[f"weights/{name}"], parameter))
        state: dict[str, Tensor] = {}
        for key in state_keys[name]:
            kind = key.rsplit("/", 1)[1]
            stays = kind == "step" and not on_device
            state[kind] = tensors[key] if stays else part_like(tensors[key], parameter)
        if state:
            optimizer.state[parameter] = state
