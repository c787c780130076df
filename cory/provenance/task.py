"""Fingerprints of what a task is made of: the source of its reward functions, and its data."""

import functools
import hashlib
import inspect
import json
import tokenize
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

CHUNK = 10_000  # rows of a data set that are in memory at a time
PLAIN = (bool, int, float, str, bytes, type(None))


def function_name(function: Callable[..., Any]) -> str:
    """A reward function's name: `module.function`, or the class of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def source_hash(function: Callable[..., Any]) -> str:
    """The start of the SHA-256 of a function's source, and of the plain values that it closes over
    or is bound to.

    What the function calls is not covered. For a callable object: the source of its class and its
    plain attributes.
    """
    values: list[Any] = []
    while isinstance(function, functools.partial):
        values += [*function.args, *sorted(function.keywords.items())]
        function = function.func
    function = inspect.unwrap(function)
    values += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    values += getattr(function, "__defaults__", None) or ()
    code = function if hasattr(function, "__qualname__") else type(function)
    if code is not function:
        values += sorted(vars(function).items())
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # builtin, or typed at a prompt
        bytecode = getattr(getattr(code, "__code__", None), "co_code", code.__qualname__.encode())
        source = bytecode.hex()
    return _digest([source, repr([value for value in values if _is_plain(value)])])


def data_hash(rows: "Dataset") -> str:
    """The start of the SHA-256 of a dataset's rows, in their order."""
    chunks = (rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK))
    return _digest(
        json.dumps(chunk, default=lambda value: type(value).__name__) for chunk in chunks
    )


def _is_plain(value: Any) -> bool:
    """Whether a value's text is the same in every process."""
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()[:16]
