"""The folder of a run, and how files are written. Importing this does not import torch.

What has its name is whole: text and folders are written beside it, under a name that begins with `.unfinished`, and
renamed. Lines of `.jsonl` files are appended; a checkpoint knows how many bytes of them count.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from cory.config import CoryConfig
from cory.errors import UserError, counted
from cory.run.settings import read_settings
from cory.settings import from_data

if TYPE_CHECKING:
    from cory.iteration import Iteration

UNFINISHED = ".unfinished"
BEST = "best"  # in a run's folder, that of its best agents (`guards.patience`)
SUMMARY = "summary.json"  # written after the agents: a run that has it is finished


class Run:
    """The folder of one run, and what was recorded in it.

    Of several processes the main one writes and prints; the others only keep the history.

    Args:
        folder: its path.
        record: the contents of config.yaml: settings, fingerprint, versions.
        writes: whether this process writes and prints.
        resumed: whether the run was begun before.
        finished: whether nothing is left to do, so that the folder is only read.

    Attributes:
        history: the lines of metrics.jsonl so far.
        seconds: that each iteration so far has taken.
        summary: what callbacks of the package add to summary.json.
        exits: closes what callbacks open, however the run ends; the last one first.
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
            tqdm.write(f"\n{text}", file=sys.stderr)  # above the progress bar, where there is one
            sys.stderr.flush()

    def add(self, iteration: "Iteration") -> None:
        """Adds an iteration to the history; the main process writes its lines."""
        self.history += iteration.records
        self.seconds.append(iteration.timings["seconds_total"])
        self.write("metrics", iteration.records)
        self.write("samples", iteration.samples)
        self.write("timings", [iteration.timings])

    def write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends lines to NAME.jsonl, in the main process only."""
        if self.writes and rows:
            with open(self.folder / f"{name}.jsonl", "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, default=str) + "\n" for row in rows)


def as_json(value: Any) -> Any:
    """A column's value as JSON has it; what JSON has not, such as a date, as text."""
    return json.loads(json.dumps(value, default=str))


def finished_iterations(run: Path) -> int | None:
    """The number of iterations after which the run was finished and its agents saved; None: it was never finished.

    A finished run that is being extended has more in metrics.jsonl, and its agents are still those of its end.
    """
    try:
        iterations = json.loads((run / SUMMARY).read_text(encoding="utf-8"))["iterations"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return iterations if isinstance(iterations, int) else None


def run_agents(folder: Path) -> dict[str, Path]:
    """A run's saved agents, in their order, by their names in an evaluation, RUN/agent_1, ...; empty if it is no run.

    Without a summary it has not ended, whatever agents lie there: they may be those of a run that has gone back since.

    Raises a UserError: it has not ended, or the folder of an agent is missing.
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
    """What an evaluation calls a run: the name of its folder, and `RUN-best` for its best agents, in RUN/best."""
    return f"{folder.parent.name}-{BEST}" if folder.name == BEST else folder.name


def short_labels(names: Iterable[str]) -> dict[str, str]:
    """Labels each run with the parts of its name that not all runs have, or else with the first part.

    >>> short_labels(["imdb_cory_tiny-credit=own-seed3", "imdb_ppo_tiny-seed3"])
    {'imdb_cory_tiny-credit=own-seed3': 'imdb_cory_tiny, credit=own', 'imdb_ppo_tiny-seed3': 'imdb_ppo_tiny'}
    """
    parts_of = {name: re.split(r"-(?=\w+=|seed\d)", name) for name in names}
    common = set.intersection(*map(set, parts_of.values())) if parts_of else set()
    return {
        name: ", ".join([part for part in parts if part not in common] or parts[:1])
        for name, parts in parts_of.items()
    }


def agent_index(name: str) -> int:
    """1, of `agent_2` and of `RUN/agent_2`."""
    return int(name.rpartition("agent_")[2]) - 1


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file; none where there is no file. Raises a UserError if it is no such file."""
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected lines of json ({error})") from None
    return parse_rows(text, str(path))


def parse_rows(text: str, name: str) -> list[dict[str, Any]]:
    """The objects of JSON lines, of which empty ones do not count.

    Raises a UserError, with `name` and the line, if one is no JSON object, or has a key twice.
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
    """The object of a JSON text. Raises a ValueError if a key stands twice, of which `json` would keep the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"expected each key once, got {[key for key, _ in pairs]}")
    return row


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from writing into a folder. The system releases the lock however the process ends.

    Raises a UserError if another process has it, or the folder cannot be written.
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
    """Makes a folder: `output`, which must be new or empty, or the first free one of runs/NAME, runs/NAME-2, ...

    Raises a UserError if that is not possible. Hidden files do not count, such as the lock of a process that was killed
    before it had written anything.
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
        remedy = f". --resume {shlex.quote(str(folder))} continues that run" if is_run else ""
        raise UserError(
            f"output: expected a new or empty folder, got {output!r}, which holds {names[0]}{remedy}"
        )
    return folder


def _cannot_be_written(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"output: expected a folder that can be written, got {str(folder)!r} ({error})"
    )


def write_text(path: Path, text: str) -> None:
    """Writes a file, or replaces it: the file has the old content or the new one."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`."""
    unfinished = path.with_name(f"{UNFINISHED}-{path.name}")
    unfinished.write_bytes(content)
    flush(unfinished)
    os.replace(unfinished, path)


def unfinished_folder(folder: Path) -> Path:
    """An empty folder in `folder`, for what gets its name when it is whole. What a killed process left goes."""
    unfinished = folder / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


@contextmanager
def filled(folder: Path) -> Iterator[Path]:
    """A folder to fill, whose files and folders get their names in `folder` when the block ends, in the place of older
    ones; not if it raises.
    """
    unfinished = unfinished_folder(folder)
    try:
        yield unfinished
        for file in unfinished.rglob("*"):
            flush(file)
        for path in sorted(unfinished.iterdir()):
            target = folder / path.name
            if target.is_dir():  # one that is deleted in part would look whole
                os.replace(target, unfinished / f"old-{path.name}")
            os.replace(path, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def flush(path: Path) -> None:
    """Waits until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
