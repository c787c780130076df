"""Checkpoints: what a run needs to go on with the very numbers that it would have had without the interruption.

    RUN/checkpoints/iter-000050/     the state before iteration 50, counted from 0
        state.json                   settings, versions, iteration, KL coefficients, lengths of the run's files
        agent_1.safetensors, ...     trained weights, value head, Adam's moments
        manifest.json                size and SHA-256 of every file

Random streams need no file, as each iteration's derive from (seed, iteration, process). A checkpoint is written beside
its final place, flushed to the disk and renamed, so it is there completely or not at all; nothing in it is executed.
"""

import hashlib
import json
import os
import re
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cory.agent import Agent
from cory.config import Config, UserError
from cory.tracking import FILES, Run, versions

FORMAT = 1
FREE = {"iterations", "output", "tracker", "resume", "checkpoint", "sample_every", "versions"}  # may differ on resume


class Damaged(Exception):
    """A checkpoint cannot be used; the message says why."""


def save(
    folder: Path,
    iteration: int,
    agents: Sequence[Agent],
    state: Mapping[str, Any],
    keep: int,
    spare: Path | None = None,
) -> Path | None:
    """Writes the state before `iteration` to `folder`/iter-..., then removes all but the newest `keep`.

    Args:
        state: what else to remember, as json.
        spare: a checkpoint that stays in any case.

    Returns:
        its folder; None, after a warning, where it could not be written (disk full). Earlier ones are then all there.
    """
    target = _place(folder, iteration)
    partial: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
        numbers = {}
        for agent in agents:
            tensors, numbers[agent.name] = agent.state()
            save_file(tensors, partial / f"{agent.name}.safetensors")
        content = {"format": FORMAT, "iteration": iteration, "agents": numbers, **state}
        (partial / "state.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        files = {
            file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in sorted(partial.iterdir())
        }
        (partial / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
        for file in partial.iterdir():
            _flush(file)
        _flush(partial)
        aside = folder / f".replaced-{target.name}"
        shutil.rmtree(aside, ignore_errors=True)
        if target.exists():  # a damaged one that was skipped, or the run has gone back before it
            target.rename(aside)
        partial.rename(target)
        _flush(folder)
        shutil.rmtree(aside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        warnings.warn(
            f"The checkpoint before iteration {iteration} could not be written to {folder} ({error}). The run goes on; "
            "earlier checkpoints are as they were.",
            stacklevel=2,
        )
        return None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    for old in _folders(folder)[keep:]:
        if old != spare and old != target:
            shutil.rmtree(old, ignore_errors=True)
    return target


def _place(folder: Path, iteration: int) -> Path:
    return folder / f"iter-{iteration:06d}"


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    found = [path for path in folder.glob("iter-*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def read(path: Path, agents: Sequence[str]) -> dict[str, Any]:
    """The checked `state.json` of a checkpoint, all of whose files are as they were written.

    Raises:
        Damaged: a file is missing, truncated, altered, or no part of a checkpoint of these agents.
    """
    manifest = _json(path / "manifest.json")
    expected = {"state.json", *(f"{agent}.safetensors" for agent in agents)}
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict) or set(files) != expected:
        found = sorted(files) if isinstance(files, dict) else files
        raise Damaged(f"manifest.json lists {found}, expected {sorted(expected)} in format {FORMAT}")
    for name, promised in files.items():
        file = path / name
        if not isinstance(promised, dict):
            raise Damaged(f"manifest.json has no size of {name}")
        if not file.is_file() or file.is_symlink():
            raise Damaged(f"{name} is missing")
        if file.stat().st_size != promised.get("bytes"):
            raise Damaged(f"{name} has {file.stat().st_size} bytes, expected {promised.get('bytes')}")
        if _digest(file) != promised.get("sha256"):
            raise Damaged(f"{name} differs from what was written (SHA-256)")
    state = _json(path / "state.json")
    kinds = {"iteration": int, "config": dict, "agents": dict, "lengths": dict, "before": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
    if wrong or state["iteration"] < 0 or set(state["lengths"]) != set(FILES):
        raise Damaged(f"state.json lacks {wrong or 'an iteration from 0 or the lengths of ' + ', '.join(FILES)}")
    for name, length in state["lengths"].items():
        file = path.parent.parent / f"{name}.jsonl"
        if not isinstance(length, int) or length < 0 or not file.is_file() or file.stat().st_size < length:
            raise Damaged(f"{file.name} of its run is missing or shorter than it was")
    return state


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise Damaged(f"{file.name} is missing") from None
    except ValueError:
        raise Damaged(f"{file.name} is no json") from None
    if not isinstance(content, dict):
        raise Damaged(f"{file.name} is no json object")
    return content


def newest(run: Path, agents: Sequence[str]) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint of a run that is whole, and its state; says which others are skipped and why."""
    for path in _folders(run / "checkpoints"):
        try:
            return path, read(path, agents)
        except Damaged as error:
            print(f"Skipping the checkpoint {path}: {error}.", flush=True)
    return None


def load(path: Path, state: Mapping[str, Any], agents: Sequence[Agent]) -> None:
    """Gives the agents the state of a checkpoint that `read` has checked.

    Raises:
        UserError: it is of other models.
    """
    for agent in agents:
        try:
            agent.load_state(load_file(path / f"{agent.name}.safetensors"), state["agents"][agent.name])
        except (LookupError, TypeError, ValueError, SafetensorError) as error:
            raise UserError(f"resume: expected a checkpoint of these agents, got {str(path)!r} ({error})") from None


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The settings in which a run differs from the one to continue, of those that matter: "key: saved -> wanted"."""
    for key in [*saved, *(key for key in wanted if key not in saved)]:
        if not prefix and key in FREE:
            continue
        old, new = saved.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}: {old!r} -> {new!r}"


class Saver:
    """Decides when a run is saved, and remembers its best checkpoint.

    Args:
        run: whose folder the checkpoints go to.
        before: the samples before training, which the end of the run shows.
        state: of the checkpoint that the run continues from, if any.
    """

    def __init__(self, run: Run, agents: Sequence[Agent], before: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        self.run, self.agents, self.before = run, agents, before
        self.settings = run.config.checkpoint
        self.best: dict[str, Any] | None = state.get("best")

    def after(self, k: int, records: Sequence[Mapping[str, Any]], last: bool) -> None:
        """Saves after iteration `k`, where one is due or it is the last."""
        every = self.settings.save_every
        if last or (every and (k + 1) % every == 0):
            if self.settings.best is not None:
                value = statistics.fmean(record[self.settings.best] for record in records)
                if self.best is None or value > self.best["value"]:
                    self.best = {"value": value, "iteration": k + 1}
            self.save(k + 1)

    def save(self, iteration: int) -> Path | None:
        """Saves the state before `iteration`, in the main process: the agents are the same in all."""
        if not self.run.writes:
            return None
        folder = self.run.folder / "checkpoints"
        spare = None if self.best is None else _place(folder, self.best["iteration"])
        try:
            lengths = self.run.lengths()
        except OSError as error:
            warnings.warn(f"No checkpoint before iteration {iteration}: {self.run.folder} ({error})", stacklevel=2)
            return None
        state = {
            "config": asdict(self.run.config),
            "versions": versions(),
            "lengths": lengths,
            "before": self.before,
            "best": self.best,
        }
        return save(folder, iteration, self.agents, state, self.settings.keep, spare)

    def give_up(self, k: int, untouched: bool) -> str:
        """Before an error in iteration `k` ends the run: saves, if the agents are as they were; says where to go on."""
        if untouched:
            self.save(k)
        there = _folders(self.run.folder / "checkpoints")
        return f"The last good state is {there[0]}" if there else "No state is saved"


@dataclass
class Resumed:
    """A run to continue: its folder, and its newest whole checkpoint with that state; None: from the beginning."""

    run: Path
    checkpoint: Path | None
    state: dict[str, Any]


def find(config: Config, name: str, agents: Sequence[str]) -> Resumed | None:
    """What `config.resume` asks for, and says so; None for a new run.

    Raises:
        UserError: there is no such run or checkpoint, it is damaged, or its settings differ in what matters.
    """
    if config.resume is None:
        return None
    wanted = json.loads(json.dumps(asdict(config)))
    if config.resume == "auto":
        runs = [Path(config.output)] if config.output else _runs(name)
        for run in runs:
            if not (run / "config.yaml").exists():
                continue
            changed = list(differences(_settings(run), wanted))
            if changed and config.output:
                _refuse(run, changed)
            if not changed:
                return _resumed(run, newest(run, agents))
        print("resume: no earlier run with these settings; starting a new one.", flush=True)
        return None
    path = Path(config.resume)
    if (path / "manifest.json").exists():
        try:
            run, found = path.parent.parent, (path, read(path, agents))
        except Damaged as error:
            raise UserError(f"resume: expected a whole checkpoint, got {str(path)!r}: {error}") from None
    elif (path / "config.yaml").exists():
        run, found = path, newest(path, agents)  # type: ignore[assignment]
    else:
        raise UserError(f"resume: expected auto, or the folder of a run or of a checkpoint, got {config.resume!r}")
    changed = list(differences(found[1]["config"] if found else _settings(run), wanted))
    if changed:
        _refuse(path, changed)
    return _resumed(run, found)


def _runs(name: str) -> list[Path]:
    """The folders that runs of this name get by default, newest first."""
    found = [path for path in Path("runs").glob(f"{name}*") if re.fullmatch(re.escape(name) + r"(-\d+)?", path.name)]
    return sorted(found, key=lambda path: int(path.name[len(name) + 1 :] or 1), reverse=True)


def _settings(run: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"resume: expected the settings of a run in {str(run / 'config.yaml')!r} ({error})") from None
    return settings if isinstance(settings, dict) else {}


def _refuse(path: Path, changed: list[str]) -> None:
    raise UserError(f"resume: expected the settings of {str(path)!r}, got others: {'; '.join(changed)}")


def _resumed(run: Path, found: tuple[Path, dict[str, Any]] | None) -> Resumed:
    path, state = found or (None, {"iteration": 0, "lengths": {}})
    where = f"checkpoint {path}" if path else f"the beginning, as {run} has no whole checkpoint"
    print(f"Resuming {run} from {where}: next is iteration {state['iteration'] + 1}.", flush=True)
    return Resumed(run, path, state)
