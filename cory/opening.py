"""The run that a trainer makes: a new one, or one that is continued; and the advice that its errors give."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from cory.config import Config
from cory.errors import NotFinite, UserError
from cory.parallel import distributed
from cory.report.page import NAME as REPORT
from cory.report.page import write_run_report
from cory.resume import checkpoint
from cory.resume.advice import after_not_finite, how_to_continue
from cory.resume.checkpoint import RunState
from cory.resume.find import Resumed, find_resumed
from cory.run.folder import Run
from cory.run.output import partial_name

if TYPE_CHECKING:
    from cory.trainer import CoryTrainer


def find_run(trainer: CoryTrainer, record: dict[str, Any], locks: ExitStack) -> Resumed | None:
    """The run that `config.resume` names, in all processes; None starts a new one.

    Args:
        record: the contents of config.yaml.
        locks: gets the lock of its folder.

    Raises:
        UserError: it cannot be continued.
    """
    resumed = None
    if distributed.is_main():
        names = [agent.name for agent in trainer.trained_agents]
        resumed = find_resumed(trainer.config, record, trainer.name, names, locks)
    return distributed.broadcast_object(resumed)


def open_run(
    trainer: CoryTrainer, record: dict[str, Any], resumed: Resumed | None, exits: ExitStack
) -> tuple[RunState, Run]:
    """A new run, or the one that is continued, whose agents are loaded; and its state.

    Args:
        record: the contents of config.yaml.
        resumed: see `find_run`.
        exits: gets the lock of a new folder, and what else the run closes at its end.

    Raises:
        UserError: the folder cannot be written.
    """
    config = trainer.config
    if resumed is None:
        state = RunState(config=record)
        run = Run(config, trainer.name, record, exits=exits)
    else:
        state = resumed.state
        if resumed.checkpoint is not None:
            checkpoint.load(resumed.checkpoint, state, trainer.trained_agents)
        record["date"] = state.config.get("date", record["date"])
        state.config = record
        run = Run(
            config,
            trainer.name,
            record,
            folder=resumed.run,
            lengths=state.lengths,
            outdated=resumed.outdated,
            exits=exits,
        )

    engine = trainer.agents[0].engine  # that of all agents
    if engine is not None:
        # By this name, what a killed run leaves of it goes when that is continued.
        engine.folder = partial_name(run.folder / "engine")
        exits.callback(shutil.rmtree, engine.folder, ignore_errors=True)
    return state, run


def finished_run(trainer: CoryTrainer, record: dict[str, Any], resumed: Resumed) -> Run:
    """A run of which nothing is left to do."""
    config = trainer.config
    run = Run(config, trainer.name, record, resumed.run, finished=True)
    # Killed after everything else was saved.
    if distributed.is_main() and not (run.folder / REPORT).exists():
        write_run_report(run.folder, config.method())
    return run


@contextmanager
def explaining_errors(run: Run, config: Config, part: str) -> Iterator[None]:
    """An error that ends the run in `part` of it says what is saved and how to continue.

    Errors for users say it in their message; others print it and keep their traceback. Which
    processes have the error: `cory/parallel/distributed.py`.
    """
    try:
        yield
    except (UserError, NotFinite) as error:
        lines = [f"{part}: {error}", *getattr(error, "__notes__", ()), _advice(run, config, error)]
        raise UserError("\n".join(lines)) from None
    except Exception as error:
        print(f"\n{part.capitalize()} failed. {_advice(run, config, error)}", file=sys.stderr)
        raise


def _advice(run: Run, config: Config, error: Exception) -> str:
    """What is saved, and the command that continues from there."""
    if run.finished:
        return f"The run is complete and saved in {run.folder}."
    newest = next(iter(checkpoint.folders(run.folder / "checkpoints")), None)
    if isinstance(error, NotFinite):
        return after_not_finite(run.folder, newest)
    return how_to_continue(run.folder, newest, config, run.iterations_done)
