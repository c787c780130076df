"""Which run `--resume` continues, and what it refuses. Nothing is written here but a lock.

A run continues from its newest valid checkpoint; later iterations are computed again.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cory.config import Config
from cory.errors import UserError
from cory.identity import check_models
from cory.plural import counted
from cory.resume import checkpoint
from cory.resume.advice import new_run, resume_command
from cory.resume.checkpoint import RunState
from cory.resume.differences import Difference, differences, in_words
from cory.run.output import lock
from cory.run.record import finished_iterations, read_settings, recorded_iterations, stopped_by

WATCHED_VERSIONS = ("torch", "transformers", "trl")


@dataclass
class Resumed:
    """A run to continue.

    Args:
        run: its folder. checkpoint: from which it continues; None: from the beginning. state: that of the checkpoint.
        finished: all iterations are done and everything is saved, so there is nothing to do.
        outdated: newer checkpoints, which are damaged and must go first.
    """

    run: Path
    checkpoint: Path | None
    state: RunState
    finished: bool = False
    outdated: list[Path] = field(default_factory=list)


def find_resumed(
    config: Config, wanted: Mapping[str, Any], name: str, agents: Sequence[str], locks: ExitStack
) -> Resumed | None:
    """Finds and announces what `config.resume` asks for; None for a new run.

    Args:
        wanted: what config.yaml would hold. name: of the run, for `resume: auto`. agents: their names.
        locks: locks the run until it is closed, before its state is read, which a running process would change.

    Raises a UserError: there is no such run, its settings, task or models differ in what matters, another process is
    writing it, or continuing would lose what is finished.
    """
    if config.resume is None:
        return None
    wanted = json.loads(json.dumps(wanted))
    if config.resume == "auto":
        run = _newest_alike(config, wanted, name)
        if run is None:
            print("resume: no earlier run with these settings; starting a new one.", flush=True)
            return None
        lock(run, locks)
        return _from_newest(run, config, wanted, agents)

    path = Path(config.resume)
    if not (path / "config.yaml").exists():
        raise UserError(f"resume: expected auto, or the folder of a run, got {config.resume!r}")
    lock(path, locks)
    return _from_newest(path, config, wanted, agents)


def _newest_alike(config: Config, wanted: Mapping[str, Any], name: str) -> Path | None:
    """The run in `config.output`, else the newest one of this name that has the same settings."""
    if config.output:
        run = Path(config.output)
        return run if (run / "config.yaml").exists() else None
    for run in _runs(name):
        if (run / "config.yaml").exists() and not _changed(_settings(run), wanted):
            return run
    return None


def _runs(name: str) -> list[Path]:
    """The folders that runs of this name get by default, newest first."""
    runs = [
        path
        for path in Path("runs").glob("*")
        if re.fullmatch(re.escape(name) + r"(-\d+)?", path.name)
    ]
    return sorted(runs, key=lambda path: int(path.name[len(name) + 1 :] or 1), reverse=True)


def _from_newest(
    run: Path, config: Config, wanted: Mapping[str, Any], agents: Sequence[str]
) -> Resumed:
    """Continues a run from its newest valid checkpoint, or an unfinished one without any from the beginning."""
    _check_agents(run, wanted)
    newest = checkpoint.newest(run, agents)
    if newest is None:
        path, state = None, RunState(config=_settings(run))
    else:
        path, state = newest
    _check_settings(run, state.config, wanted)
    recorded = recorded_iterations(run)
    finished = finished_iterations(run)
    if config.iterations < recorded:
        raise UserError(
            f"iterations: expected at least {recorded}, as many as {str(run)!r} has done, got {config.iterations}. "
            f"Nothing was changed. {new_run(run)}"
        )
    all_is_saved = finished == recorded and all((run / name).is_dir() for name in agents)
    if all_is_saved and _says_finished(run, recorded, state, config):
        return Resumed(run, path, state, finished=True)
    if finished is not None and state.iteration < finished:
        raise UserError(
            f"resume: expected a checkpoint of the end of {str(run)!r}, which has finished "
            f"{counted(finished, 'iteration')}, got {path or 'no valid one'}. Nothing was changed. {new_run(run)}"
        )
    if newest is None:
        _check_never_saved(run, state.config, recorded)
    where = (
        f"checkpoint {path}"
        if path
        else f"the beginning, as {run} has not reached its first checkpoint"
    )
    print(f"Resuming {run} from {where}: {_next(state)}.", flush=True)
    damaged = checkpoint.newer_than(run / "checkpoints", state.iteration)
    return Resumed(run, path, state, outdated=damaged)


def _says_finished(run: Path, recorded: int, state: RunState, config: Config) -> bool:
    """Whether a run of which all is saved has nothing left to do, which is printed, with how to go on all the same."""
    guard = stopped_by(run)
    if guard is not None:
        done = f"{recorded} of {counted(state.config['iterations'], 'iteration')}"
        print(
            f"{run} is finished: {guard} ended it after {done}, and all is saved. To train its agents further, start a "
            f"new run from them (model.name: {run}/agent_1).",
            flush=True,
        )
        return True
    if config.iterations == recorded:
        done = "its iteration is" if recorded == 1 else f"all {recorded} iterations are"
        print(f"{run} is finished: {done} done and saved. ", end="")
        print(_how_to_extend(run, config, 2 * recorded), flush=True)
        return True
    return False


def _how_to_extend(run: Path, config: Config, iterations: int) -> str:
    """The command that extends a finished run to so many iterations, or why there is none."""
    if config.ppo.schedule != "constant":
        return (
            f"It cannot be extended, as ppo.schedule: {config.ppo.schedule} depends on iterations."
        )
    return f"To extend it: {resume_command(run, iterations)}"


def _check_never_saved(run: Path, saved: Mapping[str, Any], recorded: int) -> None:
    """Raises a UserError if a run without a valid checkpoint has had one, so that it cannot start again by itself.

    `saved`: its settings.
    """
    damaged = checkpoint.folders(run / "checkpoints")
    if not damaged and checkpoint.may_have_none(saved["checkpoint"]["save_every"], recorded):
        return
    checkpoints = f"{len(damaged)} damaged ones" if damaged else "none"
    raise UserError(
        f"resume: expected a valid checkpoint in {str(run / 'checkpoints')!r}, as metrics.jsonl has "
        f"{counted(recorded, 'iteration')}, got {checkpoints}. Nothing was changed. {new_run(run)}"
    )


def _next(state: RunState) -> str:
    if state.stopped_by is None:
        return f"next is iteration {state.iteration + 1}"
    done = counted(state.iteration, "iteration")
    return f"{state.stopped_by} ended it after {done}, and what is missing is saved"


def _check_agents(run: Path, wanted: Mapping[str, Any]) -> None:
    """Raises a UserError if a run has other agents, for which its checkpoints would pass as damaged."""
    if not (run / "config.yaml").exists():
        return
    saved = _settings(run)
    others = [
        change
        for change in differences(saved, wanted)
        if change.key in ("agents", "cory.num_agents")
    ]
    if others:
        raise UserError(_other_settings(run, others, saved, wanted))


def _other_settings(
    run: Path, changed: list[Difference], saved: Mapping[str, Any], wanted: Mapping[str, Any]
) -> str:
    listed = "; ".join(in_words(changed, saved, wanted))
    return (
        f"resume: expected the settings of {str(run)!r}, got others: {listed}. To go on with others, start a new run "
        f"from its agents (model.name: {run}/agent_1). {new_run(run)}"
    )


def _settings(run: Path) -> dict[str, Any]:
    try:
        return read_settings(run)
    except UserError as error:
        raise UserError(f"resume: {error}") from None


def _check_settings(run: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises a UserError if a run has other settings, task or models. Warns of other versions of the libraries."""
    changed = _changed(saved, wanted)
    if changed:
        raise UserError(_other_settings(run, changed, saved, wanted))
    check_models(
        _fingerprint(saved).get("models") or {}, _fingerprint(wanted).get("models") or {}, str(run)
    )
    _warn_of_versions(saved.get("versions") or {}, wanted["versions"])


def _fingerprint(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.yaml records of task and models; nothing if it does not."""
    return settings.get("fingerprint") or {}


def _changed(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Difference]:
    """The differences with which a run does not continue."""
    changed = differences(saved, wanted)
    if _same_models(saved, wanted):
        # Such as a branch that has moved since, now named by its commit.
        return [change for change in changed if change.key != "model.revision"]
    return list(changed)


def _same_models(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether both record the same policy, by its identity."""
    identity = _identity_of_policy(saved)
    return identity is not None and identity == _identity_of_policy(wanted)


def _identity_of_policy(record: Mapping[str, Any]) -> str | None:
    models = _fingerprint(record).get("models") or {}
    return (models.get("model.name") or {}).get("identity")


def _warn_of_versions(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    others = []
    for name in WATCHED_VERSIONS:
        if name in saved and saved[name] != now[name]:
            others.append(f"{name} {saved[name]} -> {now[name]}")
    if others:
        print(
            f"Warning: the run began with other versions: {', '.join(others)}. Its numbers may differ from those of an "
            "uninterrupted run.",
            file=sys.stderr,
        )
