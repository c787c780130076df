"""Which run `--resume` continues, from which checkpoint, and what it refuses. Nothing is written here but a lock.

Only iterations after the newest valid checkpoint of an unfinished run may be dropped, as they are computed again.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cory.cli.load import run_of_checkpoint
from cory.config import Config
from cory.errors import UserError
from cory.plural import counted
from cory.provenance.models import check_models
from cory.resume import checkpoint
from cory.resume.advice import MENDED_REWARD, WITHOUT_PATIENCE, new_run, resume_command
from cory.resume.best import check_resumed
from cory.resume.checkpoint import Damaged, RunState
from cory.resume.differences import DATA, HELD_OUT, Difference, differences, in_words
from cory.run.output import lock
from cory.run.record import (
    CALLBACK,
    best_folder,
    best_of,
    finished_iterations,
    read_settings,
    recorded_iterations,
    stopped_by,
)

# What `accept_changes: reward` accepts: keys of config.yaml.
OF_THE_REWARD = (
    "fingerprint.reward",
    "fingerprint.reward_sha256",
    "fingerprint.team_reward",
    "fingerprint.team_reward_sha256",
    "task.reward",
    "task.reward_weights",
    "task.team_reward",
)
# Guards decide when a run ends, and change no number of its iterations. Runs of a study that differ in them are
# different, so they are none of `FREE`.
GUARDS = "guards."
WATCHED_VERSIONS = ("torch", "transformers", "trl")


@dataclass
class Resumed:
    """A run to continue.

    Args:
        run: its folder. checkpoint: from which it continues; None: from the beginning. state: that of the checkpoint.
        finished: all iterations are done and everything is saved, so there is nothing to do.
        outdated: what lies after the checkpoint and must go first: newer checkpoints, which are damaged or given up
            with `overwrite`; with that the summary and the best agents, too.
        changes: what was accepted so far and now, as in config.yaml.
    """

    run: Path
    checkpoint: Path | None
    state: RunState
    finished: bool = False
    outdated: list[Path] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)


def find_resumed(
    config: Config, wanted: Mapping[str, Any], name: str, agents: Sequence[str], locks: ExitStack
) -> Resumed | None:
    """Finds and announces what `config.resume` asks for; None for a new run.

    Args:
        wanted: what config.yaml would hold. name: of the run, for `resume: auto`. agents: their names.
        locks: locks the run until it is closed, before its state is read, which a running process would change.

    Raises a UserError: there is no such run or checkpoint, its settings or models differ in what matters, another
    process is writing it, or continuing would lose what is finished.
    """
    if config.resume is None:
        _refuse_overwrite(config)
        return None
    wanted = json.loads(json.dumps(wanted))
    if config.resume == "auto":
        _refuse_overwrite(config)
        run = _newest_alike(config, wanted, name)
        if run is None:
            print("resume: no earlier run with these settings; starting a new one.", flush=True)
            return None
        lock(run, locks)
        return _from_newest(run, config, wanted, agents)

    check_resumed(config)
    path = Path(config.resume)
    if (path / "manifest.json").exists():
        run = run_of_checkpoint(path)
        if (run / "config.yaml").exists():
            lock(run, locks)
        return _from_checkpoint(path, config, wanted, agents)
    _refuse_overwrite(config)
    if not (path / "config.yaml").exists():
        raise UserError(
            f"resume: expected auto, or the folder of a run or of a checkpoint, got {config.resume!r}"
        )
    lock(path, locks)
    return _from_newest(path, config, wanted, agents)


def _refuse_overwrite(config: Config) -> None:
    if config.overwrite:
        raise UserError("overwrite: expected false, unless resume names a checkpoint, got True")


def _newest_alike(config: Config, wanted: Mapping[str, Any], name: str) -> Path | None:
    """The run in `config.output`, else the newest one of this name that has the same settings."""
    if config.output:
        run = Path(config.output)
        return run if (run / "config.yaml").exists() else None
    for run in _runs(name):
        if (run / "config.yaml").exists() and not _changed(_settings(run), wanted, config):
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
    _check_settings(run, state.config, config, wanted)
    recorded = recorded_iterations(run)
    finished = finished_iterations(run)
    if config.iterations < recorded:
        raise UserError(
            f"iterations: expected at least {recorded}, as many as {str(run)!r} has done, got {config.iterations}. "
            f"Nothing was changed. {new_run(run)}"
        )
    all_is_saved = finished == recorded and all((run / name).is_dir() for name in agents)
    if all_is_saved and _says_finished(run, recorded, state, config, wanted):
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
    _lift_verdict(state, config, wanted)
    changes = _accepted_changes(state, wanted)
    _announce(run, where, state, changes, config)
    damaged = checkpoint.newer_than(run / "checkpoints", state.iteration)
    return Resumed(run, path, state, outdated=damaged, changes=changes)


def _says_finished(
    run: Path, recorded: int, state: RunState, config: Config, wanted: Mapping[str, Any]
) -> bool:
    """Whether a run of which all is saved has nothing left to do, which is printed, with how to go on all the same."""
    if config.iterations == recorded:
        done = "its iteration is" if recorded == 1 else f"all {recorded} iterations are"
        print(f"{run} is finished: {done} done and saved. ", end="")
        print(_how_to_extend(run, config, 2 * recorded), flush=True)
        return True
    guard = stopped_by(run)
    if guard is not None and _verdict_stands(guard, config, wanted, state.config):
        done = f"{recorded} of {counted(state.config['iterations'], 'iteration')}"
        print(
            f"{run} is finished: {guard} ended it after {done}, and all is saved. {_to_go_on(run, guard, config)}",
            flush=True,
        )
        return True
    return False


def _lift_verdict(state: RunState, config: Config, wanted: Mapping[str, Any]) -> None:
    """Lets a run go on that a guard or a callback has ended, unless its verdict stands."""
    guard = state.stopped_by
    if guard is not None and not _verdict_stands(guard, config, wanted, state.config):
        state.stopped_by = None


def _verdict_stands(
    guard: str, config: Config, wanted: Mapping[str, Any], saved: Mapping[str, Any]
) -> bool:
    """Whether a run that a guard has ended stays so: it is not asked for more iterations than it was planned for, and
    that guard has not changed. One that a callback has ended goes on where any other number, or `overwrite`, is asked
    for.
    """
    if guard == CALLBACK and (wanted["iterations"] != saved["iterations"] or config.overwrite):
        return False
    return wanted["iterations"] <= saved["iterations"] and (
        _guard_setting(guard, wanted) == _guard_setting(guard, saved)
    )


def _guard_setting(guard: str, settings: Mapping[str, Any]) -> Any:
    """The setting of a guard such as `guards.patience`, or of callbacks; None where settings lack it, as those of
    older runs may.
    """
    if guard == CALLBACK:
        return settings.get("callbacks")
    return (settings.get("guards") or {}).get(guard.removeprefix(GUARDS))


def _to_go_on(run: Path, guard: str, config: Config) -> str:
    """How to continue a run all the same that a guard or a callback has ended."""
    command = resume_command(run, {guard: None})
    if guard == CALLBACK and config.callbacks:
        command = resume_command(run, {"callbacks": []})
    elif guard == CALLBACK:  # one of Python's
        last = checkpoint.path_of(run / "checkpoints", recorded_iterations(run))
        command = resume_command(last, {"overwrite": True})
    return f"To go on all the same: {command}"


def _how_to_extend(run: Path, config: Config, iterations: int) -> str:
    """The command that extends a finished run to so many iterations, or why there is none."""
    if config.ppo.schedule != "constant":
        return (
            f"It cannot be extended, as ppo.schedule: {config.ppo.schedule} depends on iterations."
        )
    return f"To extend it: {resume_command(run, {'iterations': iterations})}"


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


def _from_checkpoint(
    path: Path, config: Config, wanted: Mapping[str, Any], agents: Sequence[str]
) -> Resumed:
    """Continues a run from a checkpoint that is named. Going back before what is done needs `overwrite`."""
    run = run_of_checkpoint(path)
    _check_agents(run, wanted)
    try:
        state = checkpoint.read(path, agents)
    except Damaged as error:
        raise UserError(
            f"resume: expected a valid checkpoint, got {str(path)!r}: {error}"
        ) from None
    newer = checkpoint.newer_than(path.parent, state.iteration)
    finished = finished_iterations(run)
    if not newer and (finished is None or finished <= state.iteration):
        # Nothing is lost that is not computed again.
        return _from_newest(run, config, wanted, agents)
    _check_settings(run, state.config, config, wanted)
    if not config.overwrite:
        done = (
            counted(finished, "finished iteration")
            if finished is not None
            else f"newer checkpoints up to {newer[0].name}"
        )
        raise UserError(
            f"resume: expected the newest checkpoint, or --overwrite to go back, got {str(path)!r}. {run} has {done}, "
            f"which going back would delete. Nothing was changed"
        )
    if config.iterations < state.iteration:
        raise UserError(
            f"iterations: expected at least {state.iteration}, those of {path}, got {config.iterations}"
        )
    outdated = list(newer)
    if finished is not None and finished > state.iteration:
        outdated.insert(0, run / "summary.json")
    best_agents = best_folder(run)
    is_saved = best_of(best_agents) is not None
    if is_saved and (finished_iterations(best_agents) or 0) > state.iteration:
        outdated.append(best_agents)
    _lift_verdict(state, config, wanted)
    changes = _accepted_changes(state, wanted)
    _announce(run, f"checkpoint {path}, dropping what came after it", state, changes, config)
    return Resumed(run, path, state, outdated=outdated, changes=changes)


def _announce(
    run: Path, where: str, state: RunState, changes: Sequence[Mapping[str, Any]], config: Config
) -> None:
    print(f"Resuming {run} from {where}: {_next(run, state, config)}.", flush=True)
    if changes and changes[-1]["iteration"] == state.iteration:
        print(
            f"The reward changes before iteration {state.iteration + 1}; config.yaml and the report say so.",
            flush=True,
        )


def _next(run: Path, state: RunState, config: Config) -> str:
    if state.stopped_by is None:
        return f"next is iteration {state.iteration + 1}"
    done = counted(state.iteration, "iteration")
    to_go_on = _to_go_on(run, state.stopped_by, config)
    return f"{state.stopped_by} ended it after {done}, and what is missing is saved. {to_go_on}"


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
    return f"resume: expected the settings of {str(run)!r}, got others: {listed}"


def _settings(run: Path) -> dict[str, Any]:
    try:
        return read_settings(run)
    except UserError as error:
        raise UserError(f"resume: {error}") from None


def _check_settings(
    run: Path, saved: Mapping[str, Any], config: Config, wanted: Mapping[str, Any]
) -> None:
    """Raises a UserError if a run has other settings, task or models. Warns of other versions of the libraries."""
    changed = _changed(saved, wanted, config)
    if changed:
        hint = ""
        if all(change.key in OF_THE_REWARD for change in changed):
            command = resume_command(run, MENDED_REWARD)
            hint = f". If the reward was changed on purpose: {command}"
        elif any(change.key in DATA for change in changed):
            hint = f". {new_run(run)}"
        elif [change.key for change in changed] == [HELD_OUT]:
            hint = f". To go on without patience: {resume_command(run, WITHOUT_PATIENCE)}"
        raise UserError(_other_settings(run, changed, saved, wanted) + hint)
    check_models(
        _fingerprint(saved).get("models") or {}, _fingerprint(wanted).get("models") or {}, str(run)
    )
    _warn_of_versions(saved.get("versions") or {}, wanted["versions"])


def _accepted_changes(state: RunState, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The changes of the reward that the run has been through, with the present one."""
    changes = list(state.config.get("changes") or [])
    old_reward = _reward_of(_fingerprint(state.config))
    new_reward = _reward_of(_fingerprint(wanted))
    if _fingerprint(state.config) and old_reward != new_reward:
        # No iteration was trained with that one.
        if changes and changes[-1]["iteration"] == state.iteration:
            old_reward = changes.pop()["from"]
        changes.append({"iteration": state.iteration, "from": old_reward, "to": new_reward})
    return changes


def _fingerprint(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.yaml records of task and models; nothing if it does not."""
    return settings.get("fingerprint") or {}


def _reward_of(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    keys = ["reward", "reward_sha256"]
    keys += [key for key in ("team_reward", "team_reward_sha256") if key in fingerprint]
    return {key: fingerprint.get(key) for key in keys}


def _changed(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], config: Config
) -> list[Difference]:
    """The differences that are not accepted."""
    accepted: tuple[str, ...] = OF_THE_REWARD if config.accept_changes == "reward" else ()
    if _same_models(saved, wanted):
        # Such as a branch that has moved since, now named by its commit.
        accepted += ("model.revision",)
    return [
        change
        for change in differences(saved, wanted)
        if change.key not in accepted and not change.key.startswith(GUARDS)
    ]


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
