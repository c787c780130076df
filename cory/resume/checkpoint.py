"""Checkpoints: what a run needs to continue as if it had not been interrupted.

    RUN/checkpoints/iter-000090/     the state before iteration 90, counted from 0
        state.json                   the `RunState`: settings, versions, iteration, lengths of the run's files, ...
        agent_1.safetensors, ...     of each trained agent weights, value head, the optimizer's state
                                     (`Learner.save_state`); of sharded agents a file per process
        manifest.json                size and SHA-256 of every file

Random numbers need no file, as those of an iteration derive from its number (`cory/streams.py`). A checkpoint is
written to a temporary folder, flushed to the disk and renamed, so it is complete or absent; nothing in it is executed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from cory.errors import UserError
from cory.parallel import distributed, shards
from cory.run.folder import FILES, SavedAgent
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
        agents: by name, the numbers of its learner.
        stopped_by: the guard that has ended the run, such as `guards.patience`, or "a callback"; None: nothing has.
    """

    iteration: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    before: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    agents: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped_by: str | None = None


def write(folder: Path, state: RunState, agents: Sequence[SavedAgent]) -> Path:
    """Writes a checkpoint atomically: each process what it alone has, the main one the rest.

    Raises OSError or SafetensorError in the process that could not write, FailedElsewhere in the
    others.
    """
    target = path_of(folder, state.iteration)
    is_main = distributed.is_main()

    # All processes write into the main one's temporary folder.
    partial = distributed.broadcast_object(
        distributed.fail_together(lambda: _temporary(folder) if is_main else folder)
    )
    try:
        numbers = distributed.fail_together(
            lambda: {agent.name: _write_agent(agent, partial) for agent in agents}
        )
        distributed.fail_together(
            lambda: _complete(partial, target, replace(state, agents=numbers)) if is_main else None
        )
        return target
    finally:
        if is_main:
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
    with ThreadPoolExecutor() as pool:  # hashing releases Python's lock
        digests = list(pool.map(_digest, written))
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": digest}
        for file, digest in zip(written, digests, strict=True)
    }
    (partial / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    for file in partial.iterdir():
        _flush(file)
    _flush(partial)
    if target.exists():  # a damaged one that was skipped
        remove(target)
    partial.rename(target)
    _flush(target.parent)


def path_of(folder: Path, iteration: int) -> Path:
    """The checkpoint before an iteration, in a run's folder `checkpoints`."""
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
    checkpoints = [
        path for path in folder.glob("iter-*") if path.is_dir() and path.name[5:].isdigit()
    ]
    return sorted(checkpoints, key=iteration_of, reverse=True)


def newer_than(folder: Path, iteration: int) -> list[Path]:
    """Those of later iterations, newest first."""
    return [path for path in folders(folder) if iteration_of(path) > iteration]


def iteration_of(path: Path) -> int:
    """The next iteration of a checkpoint, by its folder's name."""
    return int(path.name.removeprefix("iter-"))


def read(path: Path, agents: Sequence[str]) -> RunState:
    """The `state.json` of a checkpoint. Raises Damaged if a file is not what was written for these agents."""
    _check_files(path, agents)
    content = _json(path / "state.json")
    _check_state(content)
    for name, length in content["lengths"].items():
        file = Path(os.path.abspath(path)).parent.parent / f"{name}.jsonl"
        is_long_enough = (
            isinstance(length, int)
            and length >= 0
            and file.is_file()
            and file.stat().st_size >= length
        )
        _require(is_long_enough, f"{file.name} of its run is missing or shorter than it was")
    return RunState(
        **{key: content[key] for key in RunState.__dataclass_fields__ if key in content}
    )


def _check_files(path: Path, agents: Sequence[str]) -> None:
    """Raises Damaged unless the checkpoint's files are those of the manifest, to the byte."""
    manifest = _json(path / "manifest.json")
    files: Any = manifest.get("files")
    if not isinstance(files, dict):
        raise Damaged(f"manifest.json lists {files}, expected files by name")
    # Files per agent, one from each process if it was sharded.
    parts = max(1, (len(files) - 1) // len(agents))
    expected = sorted(["state.json", *shards.file_names(agents, parts)])
    is_as_expected = manifest.get("format") == FORMAT and sorted(files) == expected
    _require(
        is_as_expected,
        f"manifest.json lists {sorted(files)}, expected {expected} in format {FORMAT}",
    )

    for name, promised in files.items():
        file = path / name
        _require(isinstance(promised, dict), f"manifest.json has no size of {name}")
        _require(file.is_file() and not file.is_symlink(), f"{name} is missing")
        size = file.stat().st_size
        _require(
            size == promised.get("bytes"),
            f"{name} has {size} bytes, expected {promised.get('bytes')}",
        )
        _require(
            _digest(file) == promised.get("sha256"),
            f"{name} differs from what was written (SHA-256)",
        )


def _check_state(content: Mapping[str, Any]) -> None:
    """Raises Damaged if state.json lacks something."""
    types = {"iteration": int, "config": dict, "agents": dict, "lengths": dict, "before": dict}
    for key, type_ in types.items():
        _require(
            isinstance(content.get(key), type_),
            f"state.json lacks {key}, or it is no {type_.__name__}",
        )
    _require(content["iteration"] >= 0, "state.json lacks an iteration from 0")
    _require(
        set(content["lengths"]) == set(FILES), f"state.json lacks the lengths of {', '.join(FILES)}"
    )


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


def may_have_none(every: int, recorded: int) -> bool:
    """Whether a run that saves so often (`checkpoint.save_every`), and has recorded so many iterations, may not have
    completed its first checkpoint.

    An iteration is recorded before its checkpoint is written, so that of iteration `save_every` may
    be missing.
    """
    return not every or recorded <= every


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
            raise UserError(
                f"resume: expected a checkpoint of these agents, got {str(path)!r} ({error})"
            ) from None
