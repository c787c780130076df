"""The reward-function contract, and sums of several rewards."""

import inspect
import math
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from cory import coroutines
from cory.errors import RewardError, UserError, described, expect

# reward(prompts, completions, **columns) -> one number per completion, None where it does not apply: the signature of
# TRL's GRPO reward functions, `async def` ones included. `columns` are the other columns of the dataset and `role`; a
# function gets those that it names (all, if it takes **kwargs). For chat prompts all are messages, as in TRL.
RewardFunction = Callable[..., Any]
Columns = Mapping[str, Sequence[Any]]


class MissingColumns(RewardError):
    """A reward function needs columns that the data or a query does not have: `names`."""

    def __init__(self, reward: "Reward", columns: Columns, names: list[str]) -> None:
        self.names = names
        super().__init__(f"{reward}: expected parameters among {sorted(columns)}, got {names}")


@dataclass(frozen=True)
class Reward:
    """A reward function in a weighted sum: `Task(dataset, [Reward(f), Reward(g, 0.5)], prompts)`.

    `name`, for messages and records, and `sha256` of its source are by default the function's own.
    """

    function: RewardFunction
    weight: float = 1.0
    name: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        return f"reward function {self.name or getattr(self.function, '__name__', type(self.function).__name__)}"

    def arguments(self, columns: Columns) -> dict[str, Sequence[Any]]:
        """The columns that the function takes. Raises MissingColumns, a UserError, if one that it needs is missing."""
        taken = inspect.signature(self.function).parameters
        named = {n: p for n, p in taken.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        must = [name for name, parameter in named.items() if parameter.default is parameter.empty]
        missing = [name for name in must if name not in columns]
        if missing:
            raise MissingColumns(self, columns, missing)
        every = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        return {name: values for name, values in columns.items() if every or name in taken}


def score(
    reward: RewardFunction | Sequence[Reward], prompts: Sequence[Any], completions: Sequence[str], columns: Columns
) -> torch.Tensor:
    """The weighted sum of the reward functions; (batch,) float32 on the CPU.

    A function that returns None for a row does not count there; if all do, the row gets 0. Raises a RewardError, with
    the function and the row, if one raises or does not return one finite number or None per completion.
    """
    rewards = reward if isinstance(reward, Sequence) else [Reward(reward)]
    chat = len(prompts) > 0 and not isinstance(prompts[0], str)
    answers = [[{"role": "assistant", "content": text}] for text in completions] if chat else completions
    rows = {**columns, "prompts": prompts, "completions": answers}
    try:
        given = _call(rewards, rows)
        values = torch.tensor([_checked(*pair, rows) for pair in zip(rewards, given, strict=True)])
    except RewardError:
        raise
    except UserError as error:
        raise RewardError(str(error)) from error.__cause__
    if values.isnan().all(0).any():
        warnings.warn(f"{' and '.join(map(str, rewards))} returned None for a row; such rows get 0", stacklevel=2)
    return (values * torch.tensor([[each.weight] for each in rewards])).nansum(0)


def _call(rewards: Sequence[Reward], rows: Columns) -> list[Any]:
    """What each function returns, or the exception that it raises; coroutines run concurrently."""
    given: list[Any] = []
    for reward in rewards:
        arguments = reward.arguments(rows)
        try:
            given.append(reward.function(**arguments))
        except Exception as error:
            given.append(error)
    return coroutines.wait(given)


def _checked(reward: Reward, values: Any, rows: Columns) -> list[float]:
    """One number per completion, nan for None. Raises a UserError if `values` is no such list, or an exception."""
    if isinstance(values, Exception):
        raise values if isinstance(values, UserError) else _blamed(reward, values, rows) from values
    try:
        values = list(values)
    except TypeError:
        raise UserError(f"{reward}: expected a list of numbers, got {type(values).__name__}") from None
    count = len(rows["completions"])
    expect(len(values) == count, str(reward), f"{count} rewards, one per completion", len(values))
    for row, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = values[row] = value.item()
        if value is not None and (not isinstance(value, Real) or not math.isfinite(value)):
            raise UserError(f"{reward}: expected a finite number, got {value!r} {_where(row, rows)}")
    return [math.nan if value is None else float(value) for value in values]


def _blamed(reward: Reward, error: Exception, rows: Columns) -> UserError:
    """The error of a function that raised, with the first row for which it raises alone, if any."""
    where = "for the whole batch, but for none of its rows alone"
    for row in range(len(rows["completions"])):
        (given,) = _call([reward], {name: values[row : row + 1] for name, values in rows.items()})
        if isinstance(given, Exception):
            error, where = given, _where(row, rows)
            break
    last = traceback.extract_tb(error.__traceback__)[-1]
    return UserError(f"{reward}: {described(error)}, raised at {Path(last.filename).name}, line {last.lineno}, {where}")


def _where(row: int, rows: Columns) -> str:
    return f"in row {row + 1}, prompt {rows['prompts'][row]!r}, completion {rows['completions'][row]!r}"
