"""Functions that give a number to each response: the contract of rewards and of metrics."""

import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from cory import coroutines
from cory.errors import UserError, described

# function(prompts, completions, **columns) -> one number per completion, None where it does not apply: the signature of
# TRL's GRPO reward functions, `async def` ones included. `columns` are the other columns of the dataset and `role`; a
# function gets those that it names (all, if it takes **kwargs). For chat prompts all are messages, as in TRL.
Function = Callable[..., Any]
Columns = Mapping[str, Sequence[Any]]
LARGEST = torch.finfo(torch.float32).max  # a larger number is infinite as float32


class RowFunction:
    """A function that gives a number to each row.

    Attributes:
        what: what it is, in messages.
        plural: what it returns, in messages.
        unit: what a row is. The column of its plural has the rows. A completion may have None in
            place of a number.
        function: itself.
        name: in messages and records; by default the function's own.
    """

    what: ClassVar[str]
    plural: ClassVar[str]
    unit: ClassVar[str] = "completion"
    function: Function
    name: str

    def __str__(self) -> str:
        return f"{self.what} {self.name or _own_name(self.function)}"

    @property
    def short_name(self) -> str:
        """The name of the function alone: `good`, of `rewards.py:good`."""
        return (self.name or _own_name(self.function)).split(":")[-1]

    def arguments(self, columns: Columns) -> dict[str, Sequence[Any]]:
        """The columns that the function takes. Raises MissingColumns, a UserError, if one that it needs is missing."""
        parameters = inspect.signature(self.function).parameters
        named = [
            p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        missing = [p.name for p in named if p.default is p.empty and p.name not in columns]
        if missing:
            raise MissingColumns(self, columns, missing)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return {name: values for name, values in columns.items() if takes_all or name in parameters}


class MissingColumns(UserError):
    """A function needs columns that the data or a query does not have: `names`."""

    def __init__(self, function: RowFunction, columns: Columns, names: list[str]) -> None:
        self.names = names
        super().__init__(f"{function}: expected parameters among {sorted(columns)}, got {names}")


def responses_as_columns(
    prompts: Sequence[Any], completions: Sequence[str], columns: Columns
) -> dict[str, Any]:
    """All columns that a function can take. For chat prompts, completions are messages, too."""
    is_chat = len(prompts) > 0 and not isinstance(prompts[0], str)
    answers = (
        [[{"role": "assistant", "content": text}] for text in completions]
        if is_chat
        else completions
    )
    return {**columns, "prompts": prompts, "completions": answers}


def numbers_per_row(functions: Sequence[RowFunction], rows: Columns) -> torch.Tensor:
    """What each function gives each row, (functions, batch) float32 on the CPU; nan for None.

    Raises a UserError, with the function and the row, if one raises or does not return one finite
    number, or for completions None, per row.
    """
    results = _call(functions, rows)
    numbers = [
        _checked(function, result, rows)
        for function, result in zip(functions, results, strict=True)
    ]
    return torch.tensor(numbers, dtype=torch.float32).reshape(len(functions), len(rows["prompts"]))


def _own_name(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _call(functions: Sequence[RowFunction], rows: Columns) -> list[Any]:
    """What each function returns, or the exception that it raises.

    `async def` functions run concurrently, and are waited for here.
    """
    results: list[Any] = []
    for function in functions:
        arguments = function.arguments(rows)
        try:
            values = function.function(**arguments)
            results.append(list(values) if isinstance(values, Iterator) else values)
        except Exception as error:
            results.append(error)
    return coroutines.wait(results)


def _checked(function: RowFunction, values: Any, rows: Columns) -> list[float]:
    """One number per row, nan for None. Raises a UserError if `values` is no such list, or an exception."""
    if isinstance(values, UserError):
        raise values
    if isinstance(values, Exception):
        raise _blamed(function, values, rows) from values
    try:
        # Of a mapping, `list` takes the keys; a set has an order of its own.
        if isinstance(values, Mapping | Set):
            raise TypeError
        values = list(values)
    except TypeError:
        raise UserError(
            f"{function}: expected a list of numbers, got {type(values).__name__}"
        ) from None
    count = len(rows["prompts"])
    if len(values) != count:
        raise UserError(
            f"{function}: expected {count} {function.plural}, one per {function.unit}, got {len(values)}"
        )
    numbers = []
    for row, value in enumerate(values):
        if (
            isinstance(value, torch.Tensor | np.generic | np.ndarray)
            and math.prod(value.shape) == 1
        ):
            value = value.item()
        if value is None and function.unit == "completion":
            numbers.append(math.nan)
        elif isinstance(value, Real) and math.isfinite(number := _as_float(value)):
            if abs(number) > LARGEST:
                raise UserError(
                    f"{function}: expected a number of at most {LARGEST:.2g}, got {value!r} "
                    f"{_where(function, row, rows)}"
                )
            numbers.append(number)
        else:
            got = "a huge integer" if isinstance(value, int) else repr(value)
            raise UserError(
                f"{function}: expected a finite number, got {got} {_where(function, row, rows)}"
            )
    return numbers


def _as_float(value: Real) -> float:
    """Infinite for an integer that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _blamed(function: RowFunction, error: Exception, rows: Columns) -> UserError:
    """The error of a function that raised, with the first row for which it raises alone, if any."""
    where = "for the whole batch, but for none of its rows alone"
    for row in range(len(rows["prompts"])):
        (result,) = _call(
            [function], {name: values[row : row + 1] for name, values in rows.items()}
        )
        if isinstance(result, Exception):
            error = result
            where = _where(function, row, rows)
            break
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = f"{Path(last.filename).name}, line {last.lineno}"
    return UserError(f"{function}: {described(error)}, raised at {line}, {where}")


def _where(function: RowFunction, row: int, rows: Columns) -> str:
    unit = function.unit
    return f"in row {row + 1} of the batch, prompt {rows['prompts'][row]!r}, {unit} {rows[unit + 's'][row]!r}"
