"""The run's folder: its files, and what is read back from them when a run is continued."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from cory.config import Config
from cory.errors import UserError
from cory.identity import versions
from cory.parallel import distributed
from cory.run.jsonl import JsonlWriter, read_rows
from cory.run.output import new_folder, remove, remove_partial, replace_text, staged
from cory.yaml_file import yaml_text

FILES = ("metrics", "samples", "timings")


class SavedAgent(Protocol):
    """What a run's folder and its checkpoints need of an agent; see `cory.agent.Agent`."""

    name: str

    def save(self, folder: Path) -> None: ...
    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...
    def load_state(
        self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]
    ) -> None: ...


def run_record(config: Config, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of config.yaml, also kept in checkpoints: a run's settings, its task's
    fingerprint, versions, the date of its first start.

    What concerns one start alone, such as `output` and `resume`, has its default, so that the file
    can configure a new run.
    """
    record = asdict(config) | {"output": None, "resume": None}
    today = date.today().isoformat()
    return {**record, "fingerprint": dict(fingerprint), "versions": versions(), "date": today}


class Run:
    """The folder of one run, and what was recorded in it; `exits` closes everything that it opens.

    Of several processes the main one writes and prints; the others only keep the history.

    Args:
        config: the run's settings.
        name: of the run.
        record: the contents of config.yaml: see `run_record`.
        folder: of a run to continue; None makes a new one.
        lengths: of its files at the checkpoint, in bytes, by name; files are truncated to them.
        outdated: newer files and folders of the run to continue, which are removed.
        finished: whether nothing is left to do, so that the folder is only read.
        exits: gets what is closed at the end of the run, the lock of a new folder included; `folder`
            is locked already.

    Attributes:
        folder: its path.
        history: the lines of metrics.jsonl so far.
        seconds: that each iteration so far has taken.
        summary: what callbacks add to summary.json.
        finished: whether agents, curves and summary are saved.
        resumed: whether the run was begun before.
        writes: whether this process writes and prints.
        exits: what is closed at the end of the run, however it ends; the last one first.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        record: Mapping[str, Any],
        folder: Path | None = None,
        lengths: Mapping[str, int] | None = None,
        outdated: Sequence[Path] = (),
        finished: bool = False,
        exits: ExitStack | None = None,
    ) -> None:
        self.exits = exits or ExitStack()
        self.fingerprint = record.get("fingerprint") or {}
        self.history: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self.summary: dict[str, Any] = {}
        self.files: dict[str, JsonlWriter] = {}
        self.finished = finished
        self.resumed = folder is not None
        self.writes = distributed.is_main() and not finished

        if folder is None:
            folder = distributed.broadcast_object(
                new_folder(config.output, name, self.exits) if self.writes else None
            )
            assert folder is not None
        self.folder = folder

        if self.writes:
            settings = yaml_text(record)
            if self.resumed:
                self._continue(settings, lengths or {}, outdated)
            else:
                self._begin(settings)
        elif finished and distributed.is_main():
            self._read_history({})
        self.history, self.seconds = distributed.broadcast_object((self.history, self.seconds))

    def _begin(self, settings: str) -> None:
        with _can_be_written(self.folder):
            replace_text(self.folder / "config.yaml", settings)  # --resume auto knows a run by it
        self._open_files()

    def _continue(
        self, settings: str, lengths: Mapping[str, int], outdated: Sequence[Path]
    ) -> None:
        self._open_files()
        remove_partial(self.folder)
        remove_partial(self.folder / "checkpoints")
        lengths = {name: lengths.get(name, 0) for name in FILES}
        self._read_history(lengths)  # a damaged file is refused before files are cut
        # Before the files are cut, as it would be taken for newer than they are.
        for path in outdated:
            remove(path)
        for name, length in lengths.items():
            self.files[name].cut(length)
        replace_text(self.folder / "config.yaml", settings)  # with what this start has changed

    def _open_files(self) -> None:
        with _can_be_written(self.folder):
            for name in FILES:
                self.files[name] = JsonlWriter(self.folder / f"{name}.jsonl")
                self.exits.callback(self.files[name].close)

    def _read_history(self, lengths: Mapping[str, int]) -> None:
        """Reads the run's files, or the first bytes of them."""
        self.history = read_rows(self.folder / "metrics.jsonl", lengths.get("metrics"))
        timings = read_rows(self.folder / "timings.jsonl", lengths.get("timings"))
        self.seconds = [row["seconds_total"] for row in timings]

    @property
    def iterations_done(self) -> int:
        """The number of iterations in metrics.jsonl."""
        return self.history[-1]["iteration"] + 1 if self.history else 0

    def say(self, text: str) -> None:
        """Prints a line for the user, in the main process only."""
        if self.writes:
            tqdm.write(f"\n{text}", file=sys.stderr)  # above the progress bar, where there is one
            sys.stderr.flush()

    def write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends lines to the file `name`, one of FILES, in the main process only."""
        if self.writes:
            self.files[name].add(rows)

    def lengths(self) -> dict[str, int]:
        """Flushes the run's files to the disk and returns their bytes. Raises an OSError if that fails."""
        return {name: file.flushed() for name, file in self.files.items()}

    @contextmanager
    def staged(self, outdated: Sequence[Path] = ()) -> Iterator[Path]:
        """A folder that all processes fill, whose files the main one moves into the run's when the block ends; see
        `cory.run.output.staged`.

        All processes must call this. What may fail in one alone, such as on a full disk, belongs in `fail_together`.
        """
        with ExitStack() as stage:

            def begin() -> Path | None:
                if not self.writes:
                    return None
                self.lengths()  # writes what is recorded so far, before what is made of it
                return stage.enter_context(staged(self.folder, outdated))

            folder = distributed.broadcast_object(distributed.fail_together(begin))
            assert folder is not None
            yield folder
            distributed.fail_together(stage.close)


@contextmanager
def _can_be_written(folder: Path) -> Iterator[None]:
    """Turns an error of writing into one that names the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"output: expected a folder that can be written, got {str(folder)!r} ({error})"
        ) from None
