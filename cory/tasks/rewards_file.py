"""Loads reward functions from Python files. Importing this does not import torch."""

import ast
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cory.errors import UserError, described, expect

KEY = "task.reward"


class Loaded(NamedTuple):
    """A reward function, its name `FILE.py:FUNCTION`, and the hash of its file and of what that imports beside it."""

    function: Callable[..., Any]
    name: str
    sha256: str


def load_rewards(names: list[str]) -> list[Loaded]:
    """The functions that `path/to/FILE.py:FUNCTION` name; each file is run once.

    Raises a UserError: a file is missing or fails, or has no such function.
    """
    expect(bool(names), KEY, "path/to/FILE.py:FUNCTION, or a list of them", names)
    files: dict[Path, tuple[dict[str, Any], str]] = {}
    loaded = []
    for name in names:
        file, _, function = name.rpartition(":")
        expect(file.endswith(".py") and bool(function), KEY, "path/to/FILE.py:FUNCTION", name)
        path = Path(file)
        expect(path.is_file(), KEY, "an existing file", file)
        if path not in files:
            files[path] = _run(path.resolve()), _hash(path.resolve())
        there, sha256 = files[path]
        own = sorted(k for k, v in there.items() if getattr(v, "__module__", "") == there["__name__"] and callable(v))
        expect(function in there, KEY, f"a function of {file}, which has {', '.join(own) or 'none'}", function)
        expect(callable(there[function]), KEY, "a function", f"{name} = {there[function]!r}")
        loaded.append(Loaded(there[function], f"{path.name}:{function}", sha256))
    return loaded


def _run(path: Path) -> dict[str, Any]:
    """What a file defines; files beside it can be imported while it runs. No bytecode cache is used."""
    name = f"reward_file_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # which nothing else is called
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else (lines or [None])[-1]
        reason = f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else described(error)
        raise UserError(f"{KEY}: expected {path.name} to run, got {reason} (line {line})") from None
    finally:
        sys.path.remove(str(path.parent))
    return module.__dict__


def _hash(path: Path) -> str:
    """The start of the SHA-256 of a file, of the files beside it that it imports, of those that these import, ..."""
    digest, waiting, seen = hashlib.sha256(), [path], {path}
    while waiting:
        source = waiting.pop(0).read_bytes()
        digest.update(source)
        nodes = list(ast.walk(ast.parse(source)))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        for name in dict.fromkeys(name.split(".")[0] for name in names):
            beside = path.with_name(f"{name}.py")
            if beside.is_file() and beside not in seen:
                got = getattr(sys.modules.get(name), "__file__", None) or beside
                expect(Path(got).resolve() == beside.resolve(), KEY, f"{name!r} to be {beside}", str(got))
                seen.add(beside)
                waiting.append(beside)
    return digest.hexdigest()[:16]
