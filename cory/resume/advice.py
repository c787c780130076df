"""What a message says about continuing a run: what is saved, and the command."""

import shlex
from pathlib import Path

import cory.command as command
from cory.config import Config
from cory.resume.checkpoint import may_have_none


def resume_command(run: Path, iterations: int | None = None) -> str:
    """How to continue the run of this process: the command, or the settings if it was started from Python code.

    `iterations`: how many there then are; None: as many as before.
    """
    flags = f"--resume {shlex.quote(str(run))}"
    settings = f"config.resume = {str(run)!r}"
    if iterations is not None:
        flags += f" --iterations {iterations}"
        settings += f"; config.iterations = {iterations}"
    if command.from_command_line:
        return f"{command.invocation()} {flags}"
    return f"{settings} (as flags: {flags})"


def new_run(run: Path) -> str:
    """How to repeat a run from the beginning."""
    flags = f"--config {shlex.quote(str(run / 'config.yaml'))}"
    start = f"{command.invocation()} {flags}" if command.from_command_line else flags
    return f"A new run with its settings: {start}"


def how_to_continue(run: Path, newest: Path | None, config: Config, recorded: int) -> str:
    """What the message of a run that failed ends with: what is saved, and the command that continues from there.

    Args:
        newest: checkpoint, if there is one.
        recorded: iterations that are done.
    """
    saved = _saved_state(newest)
    may_begin_again = may_have_none(config.checkpoint.save_every, recorded)
    if newest is None and not may_begin_again:  # --resume would refuse
        return f"{saved} {new_run(run)}"
    return f"{saved}\nContinue with: {resume_command(run)}"


def after_not_finite(run: Path, newest: Path | None) -> str:
    """What the message of a run ends with that met a number that is not finite, as it would again."""
    settings = "a smaller ppo.learning_rate, ppo.max_grad_norm: 1, or precision: fp32"
    return f"{_saved_state(newest)}\nContinued, it would fail again. Try {settings}. {new_run(run)}"


def _saved_state(newest: Path | None) -> str:
    return f"The last good state is {newest}." if newest else "No state is saved."
