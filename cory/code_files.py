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
    """What FILE.py:NAME stands for: the function or class, FILE.py:NAME without folders, and the hash of the file."""

    value: Callable[..., Any]
    name: str
    sha256: str


# The modules of the files that this process has run, by path and hash: a reward and a callback of one file share it.
_MODULES: dict[tuple[Path, str], ModuleType] = {}


def load_code(key: str, full_name: str) -> Loaded:
    """The function or class that FILE.py:NAME stands for.

    The hash is that of the file alone, not of what it imports. Files beside it are imported by
    `from . import helper`.

    Args:
        key: of the settings, for messages.

    Raises a UserError: the file is missing, raises an error while it is loaded, or has no such
    function (of `callbacks`: class).
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
    """Whether a template is none, but the name of a function: FILE.py:NAME."""
    return re.fullmatch(r"[^{}\n]+\.py:\w+", text) is not None


def as_list(names: list[str] | str) -> list[str]:
    """Names, of which a single one need not be a list."""
    return [names] if isinstance(names, str) else names


def announce_prompts(run: Path, config: Config) -> None:
    """Says which files' code the prompts of a run's roles name, before it is run."""
    prompts = [role.prompt for role in config.roles if role.prompt and is_code(role.prompt)]
    _announce(run, prompts)


def announce_files(
    run: Path, config: Config, changed: Container[str], callbacks: bool = False
) -> None:
    """Says which files' code a run's config.yaml names, but for prompts, before it is run.

    Args:
        config: the run's settings, with what the command line changes.
        changed: the keys that the command line changes, dotted: what they name is the user's own.
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
    """The results, with what the coroutines among them return. These run concurrently."""
    if not any(map(inspect.isawaitable, results)):
        return list(results)

    async def one(result: Any) -> Any:
        try:
            return await result if inspect.isawaitable(result) else result
        except SystemExit as error:  # would end the loop's thread, for which this one waits
            raise RuntimeError("an async function has called sys.exit") from error

    async def together() -> list[Any]:
        return await asyncio.gather(*map(one, results))

    return asyncio.run_coroutine_threadsafe(together(), _event_loop()).result()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One for all calls, as HTTP clients stay bound to theirs; in a thread, as a notebook runs its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _run(key: str, path: Path, source: bytes) -> ModuleType:
    """Runs these bytes, not what a bytecode cache may have of the file, as a module of a package that is its folder."""
    package = f"folder_{hashlib.sha256(str(path.parent).encode()).hexdigest()[:8]}"
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(path.parent)]  # where relative imports look
    spec = spec_from_file_location(f"{package}.{path.stem.replace('.', '_')}", path)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        exec(compile(source, path, "exec"), vars(module))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        place = f"{path.name}, line {lines[-1]}" if lines else path.name
        # The text of a SyntaxError names file and line.
        raise UserError(f"{key}: {place}: {type(error).__name__}: {error}") from None
    return module
