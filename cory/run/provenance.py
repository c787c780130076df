"""Provenance of a run: versions, commit, and a fingerprint of the task, which settings do not capture."""

import functools
import hashlib
import inspect
import json
import platform
import subprocess
import tokenize
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets")
CHUNK = 10_000  # rows of a data set that are in memory at a time
PLAIN = (bool, int, float, str, bytes, type(None))


def versions() -> dict[str, str]:
    """Python, the libraries, and this repository's commit where it is a checkout."""
    found = {"python": platform.python_version(), **{library: version(library) for library in LIBRARIES}}
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    return found


def function_name(function: Callable[..., Any]) -> str:
    """A reward function's name for messages and records: `module.function`, or the class of a callable object."""
    function = _unwrapped(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def source_hash(function: Callable[..., Any]) -> str:
    """The start of the SHA-256 of a function's source, and of the plain values that it closes over or that are bound.

    What the function calls is not covered. For a callable object: the source of its class and its plain attributes.
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
        source = getattr(getattr(code, "__code__", None), "co_code", code.__qualname__.encode()).hex()
    return _digest([source, repr([value for value in values if _is_plain(value)])])


def data_hash(rows: Any) -> str:
    """The start of the SHA-256 of a `datasets.Dataset`'s rows, in their order."""
    chunks = (rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK))
    return _digest(json.dumps(chunk, default=lambda value: type(value).__name__) for chunk in chunks)


def _unwrapped(function: Callable[..., Any]) -> Any:
    """Below `functools.partial` and `functools.wraps`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _is_plain(value: Any) -> bool:
    """Whether a value's text is the same in every process."""
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()[:16]
