"""The reward-function contract, and the collective reward (Eq. 4)."""

import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch

from cory.config import UserError, expect

# reward(prompts, completions, **columns) -> one number per completion: the signature of TRL's GRPO reward functions.
# `columns` are the other columns of the dataset, those that the function names (all, if it takes **kwargs).
RewardFunction = Callable[..., Sequence[float]]


def score(
    reward: RewardFunction, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
) -> torch.Tensor:
    """Calls `reward`; returns (batch,) float32 on the CPU.

    Raises a UserError where it gives not one finite number per completion; it names the function and the row.
    """
    who = f"reward function {getattr(reward, '__name__', type(reward).__name__)}"
    accepted = inspect.signature(reward).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        columns = {key: values for key, values in columns.items() if key in accepted}
    values = reward(prompts=prompts, completions=completions, **columns)
    try:
        values = list(values)
    except TypeError:
        raise UserError(f"{who}: expected a list of numbers, got {type(values).__name__}") from None
    expect(len(values) == len(completions), who, f"{len(completions)} rewards, one a completion", len(values))
    for row, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = values[row] = value.item()
        if not isinstance(value, Real) or not math.isfinite(value):
            where = f"in row {row}, prompt {prompts[row]!r}, completion {completions[row]!r}"
            raise UserError(f"{who}: expected a finite number, got {value!r} {where}")
    return torch.tensor([float(value) for value in values])


def collective(task_rewards: torch.Tensor, other_coef: float) -> torch.Tensor:
    """Eq. 4, with a coefficient: `R_i = r_i + other_coef * sum_{j != i} r_j`.

    From (agents, batch) task rewards, each agent's training reward on each query. `other_coef`: 1 cooperative (Eq. 4:
    both agents get the sum), 0 independent, negative competitive.

    >>> collective(torch.tensor([[1.0, 2.0], [10.0, 20.0]]), 1.0)
    tensor([[11., 22.],
            [11., 22.]])
    """
    return (1 - other_coef) * task_rewards + other_coef * task_rewards.sum(0, keepdim=True)
