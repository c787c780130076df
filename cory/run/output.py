"""Where commands write: folders that one process at a time writes, and files that are complete or
absent.

What is written goes first under a hidden name, `.partial-NUMBER-NAME`, beside its place, and is
renamed when it is complete. A process that is killed leaves such a hidden file or folder behind;
the next one that writes removes it. A folder that is being replaced has the hidden name
`.replaced-NUMBER-NAME`; the next one that writes puts it back if nothing has taken its place.
"""

import itertools
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from cory.errors import UserError, is_disk_full

LONGEST = 200  # bytes of a folder's name; those of what is in it begin with it, and a file system takes 255
LOCK = ".lock"  # locks the folder that it is in; it stays there, empty
PARTIAL = re.compile(r"\.partial-[0-9a-f]{8}-.+")
REPLACED = re.compile(r"\.replaced-[0-9a-f]{8}-(.+)")


class Taken(UserError):
    """Another process writes to the same place."""


@contextmanager
def locked(folder: Path, name: str = LOCK) -> Iterator[None]:
    """Keeps other processes from writing into a folder; see `lock`."""
    with ExitStack() as locks:
        lock(folder, locks, name)
        yield


def lock(folder: Path, locks: ExitStack, name: str = LOCK) -> None:
    """Keeps other processes from writing into a folder that exists, until `locks` is closed.

    The system releases the lock however the process ends. A folder in which nothing can be written
    gets no lock. Raises Taken if another process has it, and a UserError if the file `name` in the
    folder cannot be opened.
    """
    try:
        locks.enter_context(FileLock(folder / name, timeout=0))
    except Timeout:
        raise Taken(
            f"output: expected a folder that no other process is writing, got {str(folder)!r}. Wait for that process, "
            "stop it, or name another folder"
        ) from None
    except (OSError, NotImplementedError) as error:
        if is_disk_full(error):
            raise
        if os.access(folder, os.W_OK):
            raise UserError(
                f"output: expected {folder / name} to be a lock of this user's, got: {error}"
            ) from None


def new_folder(output: str | None, name: str, locks: ExitStack) -> Path:
    """Makes a folder: `output`, which must hold no file, or the first free one of runs/NAME,
    runs/NAME-2, ...

    It is locked until `locks` is closed. Raises a UserError if that is not possible; nothing is
    written then.
    """
    if output is not None:
        _check_name(output)
    try:
        if output is not None:
            folder = Path(output)
            _check_empty(folder)
            folder.mkdir(parents=True, exist_ok=True)
            lock(folder, locks)
            # Another process may have filled it while this one waited for nothing.
            _check_empty(folder)
            remove_partial(folder)
            return folder
        runs = Path("runs")
        runs.mkdir(exist_ok=True)  # fails if that is a file or a broken link
        for number in itertools.count(1):
            folder = runs / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                folder.mkdir()
                lock(folder, locks)
                return folder
        raise AssertionError
    except OSError as error:
        raise UserError(
            f"output: expected a folder that can be written, got {output or 'runs'!r} ({error})"
        ) from None


def _check_name(output: str) -> None:
    """Raises a UserError if a command could not name a folder, or folders in it would have too long names."""
    if output.startswith("-"):
        raise UserError(f"output: expected a path that does not begin with a dash, got {output!r}")
    length = len(os.fsencode(Path(output).name))
    if length > LONGEST:
        raise UserError(
            f"output: expected a folder's name of at most {LONGEST} bytes, got {length}: {output!r}"
        )


def _check_empty(folder: Path) -> None:
    if folder.is_file() or any(
        path.is_file() and not _is_left(path, folder) for path in folder.rglob("*")
    ):
        where = f"{str(folder)!r}, which already holds a run or other files"
        raise UserError(f"output: expected a new or empty folder, got {where}")


def _is_left(path: Path, folder: Path) -> bool:
    """Whether a file is what a process leaves that was killed before it had written anything: a lock, partial files."""
    return path == folder / LOCK or any(
        PARTIAL.fullmatch(part) for part in path.relative_to(folder).parts
    )


def remove_partial(folder: Path) -> None:
    """Removes what killed processes have left partly written in a folder, which this process has locked.

    A folder that was to be replaced, and was not, gets its name back.
    """
    for path in folder.glob(".partial-*"):
        if PARTIAL.fullmatch(path.name):
            remove(path)
    for path in folder.glob(".replaced-*"):
        if match := REPLACED.fullmatch(path.name):
            target = folder / match[1]
            if target.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(target)


def remove(path: Path) -> None:
    """Removes a file or a folder, which is first renamed: a folder removed in part could be taken for a whole one."""
    if path.is_file() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    aside = partial_name(path)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def partial_name(path: Path) -> Path:
    """A hidden name beside a file or folder, for what is not complete."""
    return path.with_name(f".partial-{secrets.token_hex(4)}-{path.name}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of the file `path` when the block ends; if it raises, nothing changes."""
    partial = partial_name(path)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def staged(folder: Path, outdated: Sequence[Path] = ()) -> Iterator[Path]:
    """An empty folder to fill. When the block ends, its files and folders are moved into `folder`,
    by their names.

    They take the place of older ones, and the files `outdated` are removed before that. If the block raises, nothing
    changes.
    """
    with _partial_folder(folder / "new") as partial:
        yield partial
        _as_other_files(partial)
        for path in outdated:
            path.unlink(missing_ok=True)
        for path in sorted(partial.iterdir()):
            target = folder / path.name
            if path.is_dir() and target.exists():
                _replace_folder(target, path)
            else:
                path.replace(target)


def _replace_folder(target: Path, new: Path) -> None:
    """Moves a folder to the place of an older one. After a kill between the two renames, `remove_partial` puts the
    older one back.
    """
    replaced = target.with_name(f".replaced-{secrets.token_hex(4)}-{target.name}")
    target.rename(replaced)
    new.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def filled(target: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `target` when the block ends: complete or absent.

    Raises a UserError if `target` exists and is no empty folder, both before the block and after
    it, or cannot be made.
    """
    _check_new(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"expected a folder that can be made, got {str(target)!r} ({error})"
        ) from None
    with _partial_folder(target) as partial:
        yield partial
        _as_other_files(partial)
        try:
            if target.exists():
                # An empty one; elsewhere than on POSIX systems nothing is renamed onto it.
                target.rmdir()
            partial.rename(target)
        except OSError:
            _check_new(target)  # another process has filled it meanwhile
            raise


def _check_new(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"expected a new or empty folder, got {str(target)!r}, which already exists"
        )


@contextmanager
def _partial_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target`. Those that killed processes have left there are removed."""
    with suppress(OSError):
        for left in target.parent.glob(f".partial-*-{target.name}"):
            _remove_dead(left)
    partial = partial_name(target)
    try:
        with locked(partial.parent, f"{partial.name}{LOCK}"):  # tells the living from the dead
            partial.mkdir()
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        partial.with_name(f"{partial.name}{LOCK}").unlink(missing_ok=True)


def _as_other_files(folder: Path) -> None:
    """Lets others read weights as they may read other files; safetensors keeps them for their owner."""
    mode = folder.stat().st_mode & 0o666
    for weights in folder.rglob("*.safetensors"):
        with suppress(OSError):  # some file systems have no modes
            weights.chmod(mode)


def _remove_dead(partial: Path) -> None:
    """Removes a partial folder unless a living process fills it."""
    with suppress(Taken), locked(partial.parent, f"{partial.name}{LOCK}"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.with_name(f"{partial.name}{LOCK}").unlink(missing_ok=True)


def check_results_folder(folder: Path, files: Sequence[str]) -> None:
    """Raises a UserError if results cannot go into a folder: it is a file, or holds other files of
    these names.

    The first of `files` is in every folder of such results, which are replaced.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: expected a folder, got the file {str(folder)!r}")
    if (folder / files[0]).exists():
        return
    replaced = [name for name in files if (folder / name).exists()]
    if replaced:
        raise UserError(
            f"--out: expected a new folder, or one with earlier results of this kind ({files[0]}), "
            f"got {str(folder)!r}, where {', '.join(replaced)} would be replaced"
        )


def check_result_file(file: Path, mark: str) -> None:
    """Makes a result file's folder. Raises a UserError if the file is a folder, or another one than
    an earlier result.

    `mark`: what is in every such result.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        earlier = not file.exists() or mark in file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            f"--out: expected a file that can be written, got {str(file)!r} ({error})"
        ) from None
    if not earlier:
        raise UserError(
            f"--out: expected a new file, or an earlier result of this command, got {str(file)!r}"
        )
