"""Rewards: one function, or several in a weighted sum."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cory.row_functions import (
    Columns,
    Function,
    MissingColumns,
    RowFunction,
    numbers_per_row,
    responses_as_columns,
)

__all__ = [
    "MissingColumns",
    "Reward",
    "RewardFunction",
    "Scores",
    "TeamReward",
    "score",
    "score_by_function",
    "score_chains",
]
RewardFunction = Function


@dataclass(frozen=True)
class Reward(RowFunction):
    """A reward function in a weighted sum: `Task(dataset, [Reward(f), Reward(g, 0.5)], prompts)`.

    `name`, for messages and records, and `sha256` of its source are by default the function's own.
    """

    what: ClassVar[str] = "reward function"
    plural: ClassVar[str] = "rewards"
    function: RewardFunction
    weight: float = 1.0
    name: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class TeamReward(RowFunction):
    """A reward function of whole chains: `team_reward(prompts, chains, **columns) -> list[float]`.

    `chains[i]` is the list of a chain's responses by role, as texts; there is one finite number for
    each chain. `name` and `sha256` are as those of `Reward`.
    """

    what: ClassVar[str] = "team reward function"
    plural: ClassVar[str] = "rewards"
    unit: ClassVar[str] = "chain"
    function: Function
    name: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class Scores:
    """The rewards of a batch of responses.

    Args:
        total: the weighted sum, (batch,) float32 on the CPU. A function that returns None for a row
            does not count there; if all do, the row gets 0.
        by_function: of several functions, what each gave, without its weight: (batch,), nan for
            None. Empty for one.
    """

    total: torch.Tensor
    by_function: dict[str, torch.Tensor]

    def split(self, sizes: list[int]) -> list["Scores"]:
        """The scores in parts of these lengths."""
        totals = self.total.split(sizes)
        parts = {name: values.split(sizes) for name, values in self.by_function.items()}
        return [
            Scores(total, {name: values[index] for name, values in parts.items()})
            for index, total in enumerate(totals)
        ]


def score(
    reward: RewardFunction | Sequence[Reward],
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: Columns,
) -> torch.Tensor:
    """The weighted sum of the reward functions, (batch,); see `score_by_function`."""
    return score_by_function(reward, prompts, completions, columns).total


def score_by_function(
    reward: RewardFunction | Sequence[Reward],
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: Columns,
) -> Scores:
    """The rewards of responses, in sum and by function.

    Raises a UserError, with the function and the row, if one raises or does not return one finite
    number or None per completion. Without any function all rewards are 0.
    """
    rewards = reward if isinstance(reward, Sequence) else [Reward(reward)]
    if not rewards:
        return Scores(torch.zeros(len(completions)), {})
    rows = responses_as_columns(prompts, completions, columns)
    values = numbers_per_row(rewards, rows)
    if values.isnan().all(0).any():
        warnings.warn(
            f"{' and '.join(map(str, rewards))} returned None for a row; such rows get 0",
            stacklevel=3,
        )
    weights = torch.tensor([[reward.weight] for reward in rewards])
    by_function = dict(zip(names(rewards), values, strict=True)) if len(rewards) > 1 else {}
    return Scores((values * weights).nansum(0), by_function)


def score_chains(
    reward: TeamReward, prompts: Sequence[Any], chains: Sequence[Sequence[str]], columns: Columns
) -> torch.Tensor:
    """The team reward of each chain, (chains,) float32 on the CPU.

    Args:
        chains: of each, the responses by role.

    Raises a UserError, with the function and the chain, if it raises or does not return one
    finite number per chain.
    """
    rows = {**columns, "prompts": prompts, "chains": [list(chain) for chain in chains]}
    return numbers_per_row([reward], rows)[0]


def names(rewards: Sequence[Reward]) -> list[str]:
    """A name for each of several rewards: its function's, with a number where that is not the first of its name.

    >>> names([Reward(len, name="a.py:good"), Reward(len, name="a.py:short"), Reward(len, name="b.py:good")])
    ['good', 'short', 'good_2']
    >>> names([Reward(len, name=name) for name in ("a.py:good", "b.py:good_2", "c.py:good")])
    ['good', 'good_2', 'good_3']
    """
    result: list[str] = []
    for reward in rewards:
        name = reward.short_name
        number = 1
        while name in result:
            number += 1
            name = f"{reward.short_name}_{number}"
        result.append(name)
    return result
