"""Functions and classes that settings name as FILE.py:NAME: rewards, metrics, prompts, callbacks.

Importing this does not import torch.
"""

import asyncio
import functools
import hashlib
import inspect
import re
import sys
import threading
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from cory.config import Config
from cory.errors import UserError
from cory.process import is_first


@dataclass(frozen=True)
class Loaded:
    """A function or class named by FILE.py:NAME, with that name (without folders) and the file's hash."""

    value: Callable[..., Any]
    name: str
    sha256: str


# Modules of the files run by this process, by path and hash, so that functions of one file share its module.
_MODULES: dict[tuple[Path, str], ModuleType] = {}


def load_code(key: str, full_name: str) -> Loaded:
    """Loads the function or class named by FILE.py:NAME.

    The hash covers only the file, not its imports. The file can import files beside it by `from . import helper`.

    Args:
        key: key of the settings, for messages.
        full_name: FILE.py:NAME.

    Raises a UserError if the file is missing, raises an error while it is loaded, or has no such function (for
    `callbacks`: class).
    """
    file, _, name = full_name.rpartition(":")
    path = Path(file).resolve()
    if not (file.endswith(".py") and path.is_file() and name):
        raise UserError(f"{key}: expected FILE.py:NAME of an existing file, got {full_name!r}")
    source = path.read_bytes()
    sha256 = hashlib.sha256(source).hexdigest()[:16]
    if (path, sha256) not in _MODULES:
        _MODULES[path, sha256] = _run(key, path, source)
    value = getattr(_MODULES[path, sha256], name, None)
    if not callable(value) or isinstance(value, type) != (key == "callbacks"):
        kind = "class" if key == "callbacks" else "function, or an object that can be called,"
        raise UserError(f"{key}: expected a {kind} of {file}, got {name!r} = {value!r}")
    return Loaded(value, f"{path.name}:{name}", sha256)


def is_code(text: str) -> bool:
    """Whether a text is not a template but names a function, FILE.py:NAME."""
    return re.fullmatch(r"[^{}\n]+\.py:\w+", text) is not None


def as_list(names: list[str] | str) -> list[str]:
    """Returns names as a list; a single name may be given as text."""
    return [names] if isinstance(names, str) else names


def announce_prompts(run: Path, config: Config) -> None:
    """Prints which code files the prompts of a run's roles name, before running them."""
    prompts = [role.prompt for role in config.roles if role.prompt and is_code(role.prompt)]
    _announce(run, prompts)


def announce_files(
    run: Path, config: Config, changed: Container[str], callbacks: bool = False
) -> None:
    """Prints which code files a run's config.yaml names, except in prompts, before running them.

    Args:
        config: the run's settings, including changes by the command line.
        changed: dotted keys changed by the command line; they name the user's own code.
        callbacks: whether the run's callbacks are loaded, too.
    """
    task = getattr(config, "task", None)
    named = {f"task.{key}": getattr(task, key) for key in getattr(task, "FUNCTIONS", ())}
    if callbacks:
        named["callbacks"] = config.callbacks
    _announce(
        run,
        [
            name
            for key, value in named.items()
            if key not in changed
            for name in as_list(value or [])
        ],
    )


def _announce(run: Path, names: Sequence[str]) -> None:
    if names and is_first():
        files = ", ".join(name if name.isprintable() else repr(name) for name in names)
        print(f"{run / 'config.yaml'} names code, which runs now: {files}", file=sys.stderr)


def awaited(results: Sequence[Any]) -> list[Any]:
    """Returns the results, awaiting coroutines among them concurrently."""
    if not any(map(inspect.isawaitable, results)):
        return list(results)

    async def one(result: Any) -> Any:
        try:
            return await result if inspect.isawaitable(result) else result
        except SystemExit as error:  # would end the loop's thread, so that `result()` never returns
            raise RuntimeError("an async function has called sys.exit") from error

    async def together() -> list[Any]:
        return await asyncio.gather(*map(one, results))

    return asyncio.run_coroutine_threadsafe(together(), _event_loop()).result()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Returns one loop for all calls, as HTTP clients stay bound to theirs; in a thread, as notebooks run their own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _run(key: str, path: Path, source: bytes) -> ModuleType:
    """Runs `source` as a module in a package for the file's folder, bypassing any bytecode cache."""
    package = f"folder_{hashlib.sha256(str(path.parent).encode()).hexdigest()[:8]}"
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(path.parent)]  # for relative imports
    spec = spec_from_file_location(f"{package}.{path.stem.replace('.', '_')}", path)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        exec(compile(source, path, "exec"), vars(module))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        location = f"{path.name}, line {lines[-1]}" if lines else path.name
        # A SyntaxError's message names file and line itself.
        raise UserError(f"{key}: {location}: {type(error).__name__}: {error}") from None
    return module
