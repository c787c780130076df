"""Checkpoints: what a run needs to continue as if it had not been interrupted.

    RUN/checkpoints/iter-000050/     the state before iteration 50, counted from 0
        state.json                   the `RunState`: settings, versions, iteration, lengths of the run's files, ...
        agent_1.safetensors, ...     trained weights, value head, Adam's moments; of sharded agents a file per process
        manifest.json                size and SHA-256 of every file

Random streams need no file, as each iteration's derive from (seed, iteration, process). A checkpoint is written to a
temporary folder, flushed to the disk and renamed, so it is complete or absent; nothing in it is executed.
"""

import hashlib
import json
import math
import os
import shutil
import statistics
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from cory.config import CheckpointConfig, UserError
from cory.run import processes, shards
from cory.run.folder import FILES, Run, SavedAgent
from cory.run.output import partial_name, remove

FORMAT = 1


class Damaged(Exception):
    """A checkpoint cannot be used; the message says why."""


@dataclass
class RunState:
    """The state of a run between two iterations, besides its agents' tensors.

    Args:
        iteration: the next one, from 0.
        config: the contents of config.yaml: settings, the task's fingerprint, versions.
        lengths: bytes of the run's files, by name. before: sample texts before training, by agent.
        best: `value` and `iteration` of the best checkpoint, if any. agents: by name, the numbers of its learner.
    """

    iteration: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    before: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    agents: dict[str, dict[str, Any]] = field(default_factory=dict)


class CheckpointManager:
    """Saves a run's state, which the trainer updates, when it is due; keeps the newest and the best checkpoints.

    Args:
        run, agents, settings: what is saved, and when.
        state: of a new run, or as it was read from the checkpoint from which the run continues.
    """

    def __init__(self, run: Run, agents: Sequence[SavedAgent], settings: CheckpointConfig, state: RunState) -> None:
        self.run, self.agents, self.settings, self.state = run, agents, settings, state
        self.folder = run.folder / "checkpoints"
        self.saved = state.iteration  # whose checkpoint, if there is one, holds the state of this run

    def after(self, records: Sequence[Mapping[str, Any]], last: bool, stopped: bool) -> None:
        """Saves after an iteration where that is due; `state.iteration` is the next one.

        `last`: whether no iteration is left. `stopped`: whether the run ends before its time.
        """
        every = self.settings.save_every
        if stopped or (last and self.settings.save_final) or (every and self.state.iteration % every == 0):
            if self.settings.best is not None and self.settings.best in records[0]:
                value = statistics.fmean(record[self.settings.best] for record in records)
                if _is_better(value, self.state.best):
                    self.state.best = {"value": value, "iteration": self.state.iteration}
            self.save()

    def save(self) -> None:
        """Writes a checkpoint and then removes older ones. All processes must call this.

        A state that is saved already stays as it is. If a checkpoint cannot be written (disk full), warns and keeps all
        earlier ones.
        """
        if processes.broadcast(processes.is_main() and self._is_saved()):
            return
        iteration = self.state.iteration
        try:
            self.state.lengths = self.run.lengths()
            target = _write(self.folder, self.state, self.agents)
        except (OSError, SafetensorError, processes.FailedElsewhere) as error:
            failure = f"The checkpoint before iteration {iteration} could not be written to {self.folder} ({error})."
            if self.run.writes:
                warnings.warn(f"{failure} The run continues; earlier checkpoints are unchanged.", stacklevel=2)
            return
        self.saved = iteration
        if not self.run.writes:
            return
        spare = _place(self.folder, self.state.best["iteration"]) if self.state.best else None
        for old in folders(self.folder)[self.settings.keep :]:
            if old not in (spare, target):
                with suppress(OSError):
                    remove(old)

    def _is_saved(self) -> bool:
        """Whether a valid checkpoint holds the state, so that writing it again would only put that one at risk."""
        if self.saved != self.state.iteration:
            return False
        try:
            read(_place(self.folder, self.saved), [agent.name for agent in self.agents])
        except Damaged:
            return False
        return True

    def save_after(self, error: Exception, unchanged: bool) -> None:
        """Saves after an error, unless an agent was changed in any process since `state.iteration` began.

        Saving takes all processes, so the error must have been raised in all of them.
        """
        if processes.raised_everywhere(error) and not processes.all_reduce_max(not unchanged):
            self.save()

    def newest(self) -> Path | None:
        """The newest checkpoint, valid or not."""
        return next(iter(folders(self.folder)), None)


def _is_better(value: float, best: Mapping[str, Any] | None) -> bool:
    """Whether a metric's value makes its checkpoint the best so far.

    A value that is not finite (all updates of an iteration were skipped) is never the best. In checkpoints of earlier
    versions it can be; any finite one replaces it.
    """
    if not math.isfinite(value):
        return False
    return best is None or not math.isfinite(best["value"]) or value > best["value"]


def _write(folder: Path, state: RunState, agents: Sequence[SavedAgent]) -> Path:
    """Writes a checkpoint atomically: each process what it alone has, the main one the rest.

    Raises OSError or SafetensorError in the process that could not write, FailedElsewhere in the others.
    """
    target, main = _place(folder, state.iteration), processes.is_main()
    has_parts = main or processes.parallel.split  # else the main process has all that the others have
    partial = processes.broadcast(processes.agreed(lambda: _temporary(folder) if main else folder))
    try:
        mine = agents if has_parts else ()
        numbers = processes.agreed(lambda: {agent.name: _write_agent(agent, partial) for agent in mine})
        for theirs in processes.everyone(numbers):
            numbers |= {name: values for name, values in theirs.items() if values}  # each from where its agent lives
        processes.agreed(lambda: _complete(partial, target, replace(state, agents=numbers)) if main else None)
        return target
    finally:
        if main:
            shutil.rmtree(partial, ignore_errors=True)


def _temporary(folder: Path) -> Path:
    partial = partial_name(folder / "checkpoint")
    partial.mkdir(parents=True)
    return partial


def _write_agent(agent: SavedAgent, folder: Path) -> dict[str, Any]:
    tensors, numbers = agent.state()
    shards.write(tensors, folder, agent.name)
    return numbers


def _complete(partial: Path, target: Path, state: RunState) -> None:
    """Adds state and manifest to the agents' files, and moves them all to their place."""
    content = {"format": FORMAT, **asdict(state)}
    (partial / "state.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    written = sorted(partial.iterdir())
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in written}
    (partial / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    for file in partial.iterdir():
        _flush(file)
    _flush(partial)
    if target.exists():  # a damaged one that was skipped
        remove(target)
    partial.rename(target)
    _flush(target.parent)


def _place(folder: Path, iteration: int) -> Path:
    return folder / f"iter-{iteration:06d}"


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Writes a file, or a folder's list of files, to the disk. Windows has this for files that are open for writing."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folders(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    found = [path for path in folder.glob("iter-*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=iteration_of, reverse=True)


def iteration_of(path: Path) -> int:
    """The next iteration of a checkpoint, by its folder's name."""
    return int(path.name.removeprefix("iter-"))


def read(path: Path, agents: Sequence[str]) -> RunState:
    """The `state.json` of a checkpoint. Raises Damaged if a file is not what was written for these agents."""
    manifest = _json(path / "manifest.json")
    files: Any = manifest.get("files")
    found = sorted(files) if isinstance(files, dict) else files
    parts = max(1, (len(found) - 1) // len(agents)) if isinstance(files, dict) else 1
    expected = sorted(["state.json", *shards.file_names(agents, parts)])
    listed = manifest.get("format") == FORMAT and isinstance(files, dict) and found == expected
    _require(listed, f"manifest.json lists {found}, expected {expected} in format {FORMAT}")
    for name, promised in files.items():
        file = path / name
        _require(isinstance(promised, dict), f"manifest.json has no size of {name}")
        _require(file.is_file() and not file.is_symlink(), f"{name} is missing")
        size, right = file.stat().st_size, promised.get("bytes")
        _require(size == right, f"{name} has {size} bytes, expected {right}")
        _require(_digest(file) == promised.get("sha256"), f"{name} differs from what was written (SHA-256)")
    content = _json(path / "state.json")
    kinds = {"iteration": int, "config": dict, "agents": dict, "lengths": dict, "before": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(content.get(key), kind)]
    if wrong or content["iteration"] < 0 or set(content["lengths"]) != set(FILES):
        raise Damaged(f"state.json lacks {wrong or 'an iteration from 0 or the lengths of ' + ', '.join(FILES)}")
    for name, length in content["lengths"].items():
        file = path.parent.parent / f"{name}.jsonl"
        there = isinstance(length, int) and length >= 0 and file.is_file() and file.stat().st_size >= length
        _require(there, f"{file.name} of its run is missing or shorter than it was")
    return RunState(**{key: content[key] for key in RunState.__dataclass_fields__ if key in content})


def _require(ok: bool, reason: str) -> None:
    if not ok:
        raise Damaged(reason)


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise Damaged(f"{file.name} is missing") from None
    except ValueError:
        raise Damaged(f"{file.name} is not JSON") from None
    _require(isinstance(content, dict), f"{file.name} is not a JSON object")
    return content


def newest(run: Path, agents: Sequence[str]) -> tuple[Path, RunState] | None:
    """The newest valid checkpoint of a run, and its state; prints which ones are skipped and why."""
    for path in folders(run / "checkpoints"):
        try:
            return path, read(path, agents)
        except Damaged as error:
            print(f"Skipping the checkpoint {path}: {error}.", flush=True)
    return None


def load(path: Path, state: RunState, agents: Sequence[SavedAgent]) -> None:
    """Loads a checkpoint that `read` has checked into the agents. Raises a UserError if it is of other models."""
    for agent in agents:
        try:
            agent.load_state(shards.Saved(path, agent.name), state.agents[agent.name])
        except (LookupError, TypeError, ValueError, SafetensorError) as error:
            raise UserError(f"resume: expected a checkpoint of these agents, got {str(path)!r} ({error})") from None
