"""Loads functions and classes that settings name as FILE.py:NAME: rewards, metrics, prompts and callbacks.

Importing this module does not import torch.
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
    """A loaded function or class.

    Args:
        value: the function or class.
        name: FILE.py:NAME, without folders.
        sha256: start of the file's SHA-256.
    """

    value: Callable[..., Any]
    name: str
    sha256: str


# Modules loaded so far, by path and hash: functions in the same file share one module.
_MODULES: dict[tuple[Path, str], ModuleType] = {}


def load_code(key: str, full_name: str) -> Loaded:
    """Loads the function or class named by FILE.py:NAME.

    The hash covers only the file, not its imports. The file can import files in its folder: `from . import helper`.

    Args:
        key: the settings' key, for messages. `callbacks` names a class, every other key a function.
        full_name: FILE.py:NAME.

    Raises a UserError if the file is missing or fails to load, or has no such function or class.
    """
    file, _, name = full_name.rpartition(":")
    path = Path(file).resolve()
    if not (file.endswith(".py") and path.is_file() and name):
        raise UserError(
            f"{key}: expected FILE.py:NAME of an existing file, got {full_name!r}. Paths are relative to the current "
            "folder"
        )
    source = path.read_bytes()
    sha256 = hashlib.sha256(source).hexdigest()[:16]
    if (path, sha256) not in _MODULES:
        _MODULES[path, sha256] = _run(key, path, source)
    value = getattr(_MODULES[path, sha256], name, None)
    if not callable(value) or isinstance(value, type) != (key == "callbacks"):
        kind = "class" if key == "callbacks" else "function or a callable object"
        got = "no such name" if value is None else repr(value)
        raise UserError(f"{key}: expected {name!r} in {file} to be a {kind}, got {got}")
    return Loaded(value, f"{path.name}:{name}", sha256)


def is_code(text: str) -> bool:
    """Whether a text names a function, FILE.py:NAME, and is not a template."""
    return re.fullmatch(r"[^{}\n]+\.py:\w+", text) is not None


def as_list(names: list[str] | str) -> list[str]:
    """Returns names as a list; a single name becomes a list with one entry."""
    return [names] if isinstance(names, str) else names


def announce_prompts(run: Path, config: Config) -> None:
    """Prints the code files that a run's prompts name, before their code is executed."""
    prompts = [role.prompt for role in config.roles if role.prompt and is_code(role.prompt)]
    _announce(run, prompts)


def announce_files(
    run: Path, config: Config, changed: Container[str], callbacks: bool = False
) -> None:
    """Prints the code files that a run's config.yaml names, except files of prompts, before their code is executed.

    Args:
        config: the run's settings, including changes from the command line.
        changed: dotted keys set on the command line. Their code is not announced, since the user has just named it.
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
    """Returns the results of function calls; coroutines among them are awaited concurrently."""
    if not any(map(inspect.isawaitable, results)):
        return list(results)

    async def one(result: Any) -> Any:
        try:
            return await result if inspect.isawaitable(result) else result
        except SystemExit as error:
            # SystemExit would end the event loop's thread, so `result()` below would wait forever.
            raise RuntimeError("an async function has called sys.exit") from error

    async def together() -> list[Any]:
        return await asyncio.gather(*map(one, results))

    return asyncio.run_coroutine_threadsafe(together(), _event_loop()).result()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop that all calls share, since HTTP clients stay bound to one loop.

    It runs in a thread of its own, because in a notebook the main thread already runs a loop.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _run(key: str, path: Path, source: bytes) -> ModuleType:
    """Runs a file's source as a module of a package made for its folder. No bytecode cache is used."""
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
        # A SyntaxError has no frame in the file, but its message names file and line.
        raise UserError(f"{key}: {location}: {type(error).__name__}: {error}") from None
    return module
