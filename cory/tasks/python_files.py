"""Loads what settings name as `path/to/FILE.py:NAME`: rewards, metrics, callbacks. Importing this imports no torch."""

import ast
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from cory.errors import UserError, described


@dataclass(frozen=True)
class Loaded:
    """What a file defines.

    Args:
        value: it.
        file: the name of the file.
        name: of the value in the file.
        sha256: the hash of the file and of what that imports beside it, of packages all files.
    """

    value: Callable[..., Any]
    file: str
    name: str
    sha256: str

    @property
    def full_name(self) -> str:
        """FILE.py:NAME."""
        return f"{self.file}:{self.name}"


# By path: the module of a file that was run in this process; that file and those that it imports, as they were then.
_MODULES: dict[Path, tuple[ModuleType, dict[Path, bytes]]] = {}


class PythonFiles:
    """Files that settings name. In a process each is run once, unless it has changed since."""

    def __init__(self) -> None:
        self.modules: dict[Path, ModuleType] = {}
        self.hashes: dict[Path, str] = {}

    def load(self, key: str, names: Sequence[str]) -> list[Loaded]:
        """What each of `names`, FILE.py:NAME, stands for.

        Args:
            key: of the settings, for messages.

        Raises a UserError: a file is missing or fails, or defines no such function or class.
        """
        return [self._load(key, name) for name in names]

    def _load(self, key: str, full_name: str) -> Loaded:
        file, _, name = full_name.rpartition(":")
        if not (file.endswith(".py") and name):
            raise UserError(f"{key}: expected path/to/FILE.py:FUNCTION, got {full_name!r}")
        path = Path(file)
        if not path.is_file():
            raise UserError(f"{key}: expected an existing file, got {file!r}")
        path = path.resolve()
        if path not in self.modules:
            self.modules[path], self.hashes[path] = _module(key, path)
        module = self.modules[path]
        if not hasattr(module, name):
            defined = ", ".join(sorted(_defined_in(module))) or "none"
            raise UserError(
                f"{key}: expected a function of {file}, which has {defined}, got {name!r}"
            )
        value = getattr(module, name)
        if not callable(value):
            raise UserError(f"{key}: expected a function, got {f'{full_name} = {value!r}'!r}")
        return Loaded(value, path.name, name, self.hashes[path])


def _defined_in(module: ModuleType) -> Iterator[str]:
    """The functions and classes that a module defines itself."""
    for name, value in vars(module).items():
        if callable(value) and getattr(value, "__module__", "") == module.__name__:
            yield name


def _module(key: str, path: Path) -> tuple[ModuleType, str]:
    """The module of a file, and the file's hash. A reward and a callback of the same file share its globals."""
    if path in _MODULES:
        module, before = _MODULES[path]
        sources = _sources(key, path)
        if sources == before:
            return module, _hash(sources)
        _check_imported(key, path, before, sources)
    module = _run(key, path)
    sources = _sources(key, path)
    _MODULES[path] = module, sources
    return module, _hash(sources)


def _check_imported(
    key: str, path: Path, before: Mapping[Path, bytes], sources: Mapping[Path, bytes]
) -> None:
    """Raises a UserError if a file that `path` imports has changed, as Python would not read it anew."""
    imported = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    for file, source in sources.items():
        if file != path and before.get(file, source) != source and str(file) in imported:
            raise UserError(
                f"{key}: expected {file.name} as it was when {path.name} imported it, got a changed file, which only "
                "another Python process reads"
            )


def _run(key: str, path: Path) -> ModuleType:
    """Runs a file; files beside it can be imported while it runs. No bytecode cache is used."""
    # Which nothing else is called.
    name = f"file_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        # The text of a SyntaxError names the line as well.
        reason = (
            f"{type(error).__name__}: {error.msg}"
            if isinstance(error, SyntaxError)
            else described(error)
        )
        line = _line_of(error, path)
        raise UserError(f"{key}: expected {path.name} to run, got {reason} (line {line})") from None
    finally:
        sys.path.remove(str(path.parent))
    return module


def _line_of(error: BaseException, path: Path) -> int | None:
    """The line of a file in which an error was raised; None if it was elsewhere."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else None


def _hash(sources: Mapping[Path, bytes]) -> str:
    """The start of the SHA-256 of files."""
    return hashlib.sha256(b"".join(sources.values())).hexdigest()[:16]


def _sources(key: str, path: Path) -> dict[Path, bytes]:
    """A file, the files beside it that it imports, those that these import, ..., with their contents."""
    sources = {path: path.read_bytes()}
    waiting = [path]
    while waiting:
        for name in _imported(sources[waiting.pop(0)]):
            beside = _files_of(name, path.parent)
            if not beside or beside[0] in sources:
                continue
            imported = getattr(sys.modules.get(name), "__file__", None) or beside[0]
            if Path(imported).resolve() != beside[0].resolve():
                raise UserError(
                    f"{key}: expected {name!r} to be {beside[0]}, got {str(imported)!r}"
                )
            sources |= {file: file.read_bytes() for file in beside}
            waiting += beside
    return sources


def _files_of(module: str, folder: Path) -> list[Path]:
    """The files of a module or package in a folder, a package's `__init__.py` first; empty if there is none."""
    if module == "cory":  # its version and commit are recorded by themselves
        return []
    package = folder / module
    init = package / "__init__.py"
    # A folder without that file is a package if nothing else has its name.
    if init.is_file() or str(package) in getattr(sys.modules.get(module), "__path__", ()):
        return sorted(package.rglob("*.py"), key=lambda file: (file != init, file))
    file = folder / f"{module}.py"
    return [file] if file.is_file() else []


def _imported(source: bytes) -> list[str]:
    """The top-level modules that a source imports, wherever in it, each once; none that it names by leading dots."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a file of a package that nothing has imported
        return []
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.append(node.module)
    return list(dict.fromkeys(module.split(".")[0] for module in modules))
