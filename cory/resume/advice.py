"""What a message says about continuing a run: what is saved, and the command."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cory.cli import invocation
from cory.config import Config
from cory.resume.checkpoint import may_have_none

# Changed settings, by their keys, with which a run may continue where it failed.
AS_BEFORE: Mapping[str, Any] = MappingProxyType({})
MENDED_REWARD: Mapping[str, Any] = MappingProxyType({"accept_changes": "reward"})
WITHOUT_PATIENCE: Mapping[str, Any] = MappingProxyType({"guards.patience": None})


def resume_command(run: Path, changes: Mapping[str, Any] = AS_BEFORE) -> str:
    """How to continue the run of this process: the command, or the settings if it was started from Python code.

    `changes`: settings that are changed, by their keys.
    """
    flags = f"--resume {shlex.quote(str(run))}"
    settings = f"config.resume = {str(run)!r}"
    for key, value in changes.items():
        flags += f" --{key} {'null' if value is None else shlex.quote(str(value))}"
        settings += f"; config.{key} = {value!r}"
    if invocation.from_command_line:
        return f"{invocation.command()} {flags}"
    return f"{settings} (as flags: {flags})"


def new_run(run: Path) -> str:
    """How to repeat a run from the beginning."""
    flags = f"--config {shlex.quote(str(run / 'config.yaml'))}"
    command = f"{invocation.command()} {flags}" if invocation.from_command_line else flags
    return f"A new run with its settings: {command}"


def how_to_continue(
    run: Path, newest: Path | None, config: Config, recorded: int, changes: Mapping[str, Any]
) -> str:
    """What the message of a run that failed ends with: what is saved, and the command that continues from there.

    Args:
        newest: checkpoint, if there is one.
        recorded: iterations that are done.
        changes: AS_BEFORE; MENDED_REWARD if the reward function failed, so that it will be another one.
    """
    saved = _saved_state(newest)
    may_begin_again = may_have_none(config.checkpoint.save_every, recorded)
    if newest is None and not may_begin_again:  # --resume would refuse
        return f"{saved} {new_run(run)}"
    first = "Continue with"
    if changes == MENDED_REWARD:
        first = "Mend the reward, then continue with"
    return f"{saved}\n{first}: {resume_command(run, changes)}"


def after_not_finite(run: Path, newest: Path | None) -> str:
    """What the message of a run ends with that met a number that is not finite, as it would again."""
    settings = "a smaller ppo.learning_rate, ppo.max_grad_norm: 1, or precision: fp32"
    return f"{_saved_state(newest)}\nContinued, it would fail again. Try {settings}. {new_run(run)}"


def _saved_state(newest: Path | None) -> str:
    return f"The last good state is {newest}." if newest else "No state is saved."
