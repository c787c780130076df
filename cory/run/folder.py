"""A run's folder, and functions that write its files atomically. Importing this module does not import torch.

Files and folders are written under a temporary name that begins with `.unfinished`, then renamed. Anything under its
final name is complete. Lines of `.jsonl` files are appended; a checkpoint records how many of their bytes are valid.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from tqdm import tqdm

import cory.process as process
from cory.config import CoryConfig
from cory.errors import UserError, counted
from cory.run.settings import read_settings
from cory.settings import from_data

if TYPE_CHECKING:
    from cory.iteration import Iteration

UNFINISHED = ".unfinished"
BEST = "best"  # subfolder of a run with its best agents (`guards.patience`)
RECORDS = ("metrics.jsonl", "samples.jsonl", "timings.jsonl")
SUMMARY = "summary.json"  # written after the agents: its presence marks a finished run


class Run:
    """A run's folder, and the records in it.

    Only the main process writes and prints. Every process keeps the history.

    Args:
        folder: the path of the folder.
        record: the contents of config.yaml (`cory.run.checkpoint.run_record`).
        writes: whether this process writes and prints.
        resumed: whether the run continues from a checkpoint.
        finished: whether the run is complete, so that its folder is only read.

    Attributes:
        history: the lines of metrics.jsonl so far.
        seconds: the seconds of each iteration so far.
        summary: entries that cory's own callbacks add to summary.json.
        exits: closes everything that callbacks have registered with it, in reverse order, when the run ends or fails.
    """

    def __init__(
        self,
        folder: Path,
        record: Mapping[str, Any],
        writes: bool,
        resumed: bool = False,
        finished: bool = False,
    ) -> None:
        self.folder = folder
        self.record = record
        self.writes = writes
        self.resumed = resumed
        self.finished = finished
        self.summary: dict[str, Any] = {}
        self.exits = ExitStack()
        self.history = read_rows(folder / "metrics.jsonl")
        self.seconds = [row["seconds_total"] for row in read_rows(folder / "timings.jsonl")]

    def say(self, text: str) -> None:
        """Prints a line for the user, in the main process only."""
        if self.writes:
            tqdm.write(f"\n{text}", file=sys.stderr)  # above the progress bar, if any
            sys.stderr.flush()

    def add(self, iteration: "Iteration") -> None:
        """Adds an iteration to the history and, in the main process, to the files."""
        self.history += iteration.records
        self.seconds.append(iteration.timings["seconds_total"])
        lines = (iteration.records, iteration.samples, [iteration.timings])
        for name, rows in zip(RECORDS, lines, strict=True):
            if self.writes and rows:
                with open(self.folder / name, "a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row, default=str) + "\n" for row in rows)


def as_json(value: Any) -> Any:
    """Converts a column's value to JSON types. Values of other types, such as dates, become text."""
    return json.loads(json.dumps(value, default=str))


def finished_iterations(run: Path) -> int | None:
    """Returns the number of iterations after which the run finished and saved its agents; None if it never finished.

    While a finished run is being extended, metrics.jsonl is ahead of the saved agents.
    """
    try:
        iterations = json.loads((run / SUMMARY).read_text(encoding="utf-8"))["iterations"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return iterations if isinstance(iterations, int) else None


def run_agents(folder: Path) -> dict[str, Path]:
    """Returns a run's saved agents by their names in an evaluation, RUN/agent_1, ...; empty if `folder` is not a run.

    A run without a summary has not ended. If its folder has trained agents, an attempt to save them has failed. They
    may be from a later iteration than the metrics, which a resume cuts back to the last checkpoint.

    Raises a UserError: the run has not ended, or the folder of an agent is missing.
    """
    if not (folder / "config.yaml").exists():
        return {}
    if not (folder / SUMMARY).exists():
        raise UserError(
            f"{folder}: expected a run with saved agents, got one that has not ended (--resume continues it)"
        )
    count = from_data(CoryConfig, read_settings(folder).get("cory", {})).num_agents
    agents = [folder / f"agent_{number}" for number in range(1, count + 1)]
    missing = [agent.name for agent in agents if not agent.is_dir()]
    if missing:
        raise UserError(
            f"{folder}: expected the folders of its {counted(count, 'agent')}, got none for {', '.join(missing)}"
        )
    return {f"{run_label(folder)}/{agent.name}": agent for agent in agents}


def run_label(folder: Path) -> str:
    """Returns a run's name in an evaluation: its folder's name, or `RUN-best` for the best agents in RUN/best."""
    return f"{folder.parent.name}-{BEST}" if folder.name == BEST else folder.name


def short_labels(names: Iterable[str]) -> dict[str, str]:
    """Labels each run with the parts of its name that not all runs share, or with its first part if all are shared.

    >>> short_labels(["imdb_cory_tiny-credit=own-seed3", "imdb_ppo_tiny-seed3"])
    {'imdb_cory_tiny-credit=own-seed3': 'imdb_cory_tiny, credit=own', 'imdb_ppo_tiny-seed3': 'imdb_ppo_tiny'}
    """
    parts_by_name = {name: re.split(r"-(?=\w+=|seed\d)", name) for name in names}
    common = set.intersection(*map(set, parts_by_name.values())) if parts_by_name else set()
    return {
        name: ", ".join([part for part in parts if part not in common] or parts[:1])
        for name, parts in parts_by_name.items()
    }


def agent_index(name: str) -> int:
    """Returns an agent's index from its name: 1 for `agent_2` and `RUN/agent_2`."""
    return int(name.rpartition("agent_")[2]) - 1


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON Lines file; a missing file has no rows. Raises a UserError if it is not JSON Lines."""
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected lines of JSON ({error})") from None
    return parse_rows(text, str(path))


def parse_rows(text: str, name: str) -> list[dict[str, Any]]:
    """Parses JSON Lines, ignoring empty lines.

    Raises a UserError with `name` and the line number if a line is not a JSON object, or has a key twice.
    """
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=json_object)
        except ValueError as error:
            raise UserError(f"{name}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{name}, line {number}: expected an object, got {row!r}")
        rows.append(row)
    return rows


def json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a JSON object. Raises a ValueError if a key appears twice: `json` would keep only the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"expected each key once, got {[key for key, _ in pairs]}")
    return row


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from writing into a folder. The system releases the lock even if the process is killed.

    Raises a UserError if another process holds the lock, or the folder cannot be written.
    """
    try:
        lock = FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout:
        raise UserError(
            f"output: expected a folder that no other process is writing, got {str(folder)!r}. Wait for that process, "
            "stop it, or name another folder"
        ) from None
    except OSError as error:
        raise _cannot_be_written(folder, error) from None
    with lock:
        yield


def new_folder(output: str | None, name: str) -> Path:
    """Makes the folder `output`, which must be new or empty. None: the first free one of runs/NAME, runs/NAME-2, ...

    Hidden files are ignored, since a process killed before it wrote anything may have left its lock. Raises a UserError
    if the folder cannot be made or is not empty.
    """
    if output == "":
        raise UserError("output: expected the path of a folder, got ''")
    try:
        if output is None:
            Path("runs").mkdir(exist_ok=True)
            for number in itertools.count(1):
                folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
                with suppress(FileExistsError):
                    folder.mkdir()
                    return folder
        folder = Path(output or "")
        folder.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise _cannot_be_written(Path(output or "runs"), error) from None
    if names:
        is_run = (folder / "metrics.jsonl").exists()
        remedy = f". To continue that run: {resume_command(folder)}" if is_run else ""
        raise UserError(
            f"output: expected a new or empty folder, got {output!r}, which holds {names[0]}{remedy}"
        )
    return folder


def resume_command(run: Path) -> str:
    """Returns how to continue a run: the command, or the setting if this process was started from Python code."""
    if process.from_command_line:
        return f"{process.invocation()} --resume {shlex.quote(str(run))}"
    return f"config.resume = {str(run)!r}"


def _cannot_be_written(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"output: expected a folder that can be written, got {str(folder)!r} ({error})"
    )


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically: readers see either its old content or the new one."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically, like `write_text`."""
    unfinished = path.with_name(f"{UNFINISHED}-{path.name}")
    unfinished.write_bytes(content)
    flush(unfinished)
    os.replace(unfinished, path)


def unfinished_folder(folder: Path) -> Path:
    """Makes an empty temporary folder in `folder`, and removes what a killed process left in it."""
    unfinished = folder / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


@contextmanager
def filled(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder; its files and folders move into `folder` when the block ends, replacing older ones.

    Nothing is moved if the block raises.
    """
    unfinished = unfinished_folder(folder)
    try:
        yield unfinished
        for file in unfinished.rglob("*"):
            flush(file)
        for path in sorted(unfinished.iterdir()):
            target = folder / path.name
            if target.is_dir():  # rename first: a partly deleted folder would look complete
                os.replace(target, unfinished / f"old-{path.name}")
            os.replace(path, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def flush(path: Path) -> None:
    """Flushes a file, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
