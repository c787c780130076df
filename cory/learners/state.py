"""What training has changed in a learner, as tensors and numbers for a checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch

from cory.learners.ppo import PPOTrainer
from cory.learners.trl_parts import RunningMoments


def save_state(learner: PPOTrainer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Trained weights and Adam's moments, and the KL coefficient, reward moments and micro-batch as json."""
    tensors = {}
    for name, parameter in _trained(learner).items():
        tensors[f"weights/{name}"] = parameter.detach().contiguous()
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            tensors[f"adam/{name}/{key}"] = value.contiguous()
    moments = {key: float(getattr(learner.running, key)) for key in ("mean", "std", "var", "count")}
    return tensors, {"kl_coef": learner.kl_ctl.value, "moments": moments, "micro_batch": learner.micro_batch}


def load_state(learner: PPOTrainer, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
    """Loads what `save_state` returned. Nothing is changed where something does not fit.

    Raises:
        ValueError: a tensor is missing, left over, or of another shape or type than the weights here.
    """
    trained = _trained(learner)
    for name in tensors:
        if name.split("/")[1] not in trained:
            raise ValueError(f"unknown tensor {name}")
    for name, parameter in trained.items():
        saved = tensors.get(f"weights/{name}")
        if saved is None or saved.shape != parameter.shape or saved.dtype != parameter.dtype:
            came = None if saved is None else (tuple(saved.shape), saved.dtype)
            raise ValueError(f"expected {(tuple(parameter.shape), parameter.dtype)} for {name}, got {came}")
    learner.optimizer.state.clear()
    for name, parameter in trained.items():
        parameter.detach().copy_(tensors[f"weights/{name}"])
        adam = {key.rsplit("/", 1)[1]: x for key, x in tensors.items() if key.startswith(f"adam/{name}/")}
        if adam:
            learner.optimizer.state[parameter] = {key: x.to(parameter.device) for key, x in adam.items()}
    learner.kl_ctl.value = float(numbers["kl_coef"])
    learner.micro_batch = int(numbers["micro_batch"])
    learner.running = RunningMoments(learner.accelerator)
    if numbers["moments"]["count"] >= 1:  # else no reward has been seen
        for key, value in numbers["moments"].items():
            setattr(learner.running, key, torch.tensor(value) if key in ("mean", "std") else value)


def _trained(learner: PPOTrainer) -> dict[str, torch.nn.Parameter]:
    """The trained parameters by name, in the optimizer's order."""
    model = learner.accelerator.unwrap_model(learner.model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: parameter for parameter in learner.model_params}
