"""Which run to continue, from which checkpoint."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cory.config import Config, UserError, expect
from cory.run.checkpoint import Damaged, RunState, newest, read
from cory.run.settings import differences, read_settings


@dataclass
class Resumed:
    """A run to continue: its folder, and its newest whole checkpoint with that state; None: from the beginning."""

    run: Path
    checkpoint: Path | None
    state: RunState


def find(config: Config, wanted: Mapping[str, Any], name: str, agents: Sequence[str]) -> Resumed | None:
    """Finds and announces what `config.resume` asks for; None for a new run.

    Args:
        wanted: the settings and the task's fingerprint, as config.yaml has them.

    Raises:
        UserError: there is no such run or checkpoint, it is damaged, or its settings differ in what matters.
    """
    if config.resume is None:
        return None
    wanted = json.loads(json.dumps(wanted))
    if config.resume == "auto":
        for run in [Path(config.output)] if config.output else _runs(name):
            saved = _settings(run) if (run / "config.yaml").exists() else None
            if saved is not None and config.output:
                _check_same(run, saved, wanted)
            if saved is not None and not list(differences(saved, wanted)):
                return _resumed(run, newest(run, agents))
        print("resume: no earlier run with these settings; starting a new one.", flush=True)
        return None
    path = Path(config.resume)
    found: tuple[Path, RunState] | None
    if (path / "manifest.json").exists():
        try:
            run, found = path.parent.parent, (path, read(path, agents))
        except Damaged as error:
            raise UserError(f"resume: expected a whole checkpoint, got {str(path)!r}: {error}") from None
    else:
        one = (path / "config.yaml").exists()
        expect(one, "resume", "auto, or the folder of a run or of a checkpoint", config.resume)
        run, found = path, newest(path, agents)
    _check_same(path, found[1].config if found else _settings(path), wanted)
    return _resumed(run, found)


def _runs(name: str) -> list[Path]:
    """The folders that runs of this name get by default, newest first."""
    found = [path for path in Path("runs").glob(f"{name}*") if re.fullmatch(re.escape(name) + r"(-\d+)?", path.name)]
    return sorted(found, key=lambda path: int(path.name[len(name) + 1 :] or 1), reverse=True)


def _settings(run: Path) -> dict[str, Any]:
    try:
        return read_settings(run)
    except UserError as error:
        raise UserError(f"resume: {error}") from None


def _check_same(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    changed = "; ".join(differences(saved, wanted))
    if changed:
        raise UserError(f"resume: expected the settings of {str(path)!r}, got others: {changed}")


def _resumed(run: Path, found: tuple[Path, RunState] | None) -> Resumed:
    path, state = found or (None, RunState())
    where = f"checkpoint {path}" if path else f"the beginning, as {run} has no whole checkpoint"
    print(f"Resuming {run} from {where}: next is iteration {state.iteration + 1}.", flush=True)
    return Resumed(run, path, state)
