"""What a message says about continuing a run: what is saved, and the command."""

import shlex
from pathlib import Path

from cory.cli import invocation
from cory.config import Config
from cory.resume.checkpoint import may_have_none


def resume_command(run: Path, mended_reward: bool = False) -> str:
    """How to continue the run of this process: the command, or the settings if it was started from Python code.

    `mended_reward`: whether its reward function may differ from that of the run.
    """
    flags = f"--resume {shlex.quote(str(run))}"
    settings = f"config.resume = {str(run)!r}"
    if mended_reward:
        flags += " --accept_changes reward"
        settings += "; config.accept_changes = 'reward'"
    if invocation.from_command_line:
        return f"{invocation.command()} {flags}"
    return f"{settings} (as flags: {flags})"


def new_run(run: Path) -> str:
    """How to repeat a run from the beginning."""
    flags = f"--config {shlex.quote(str(run / 'config.yaml'))}"
    command = f"{invocation.command()} {flags}" if invocation.from_command_line else flags
    return f"A new run with its settings: {command}"


def how_to_continue(
    run: Path, newest: Path | None, config: Config, recorded: int, of_reward: bool
) -> str:
    """What the message of a run that failed ends with: what is saved, and the command that continues from there.

    Args:
        newest: checkpoint, if there is one.
        recorded: iterations that are done.
        of_reward: whether the reward function failed, so that it will be another one.
    """
    saved = f"The last good state is {newest}." if newest else "No state is saved."
    if newest is None and not may_have_none(config, recorded):  # --resume would refuse
        return f"{saved} {new_run(run)}"
    first = "Mend the reward, then continue with" if of_reward else "Continue with"
    return f"{saved}\n{first}: {resume_command(run, mended_reward=of_reward)}"
