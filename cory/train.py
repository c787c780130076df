"""Trains on prompts and rewards of your own: docs/own_task.md.

python -m cory.train --config my.yaml                       # two agents: CORY
python -m cory.train --config my.yaml --cory.num_agents 1   # any key as a flag; one agent: PPO
python -m cory.train --resume runs/my                       # continues a run
python -m cory.train --help                                 # every key
"""

import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from cory.cli.load import read_command_line, resumed_run
from cory.cli.main import main
from cory.config import Config
from cory.errors import UserError
from cory.plural import counted
from cory.run.run_name import run_name
from cory.run.settings import read_settings
from cory.tasks.config import OWN
from cory.tasks.kind import TaskKind, kind_of_run
from cory.tasks.python_files import announce_files


def train(
    kind: TaskKind[Any], default: Path | None = None, prefix: str = "", single_agent: bool = False
) -> None:
    """Trains on a kind of task, with the settings of the command line: the command of every task.

    Args:
        kind: of the task.
        default: configuration that is read without `--config`.
        prefix: begins the run's name, such as imdb_cory.
        single_agent: trains the first agent alone, in one role: the baseline.
    """
    _check_resumed_kind(kind)
    line = read_command_line(kind.config, default, prefix=prefix, single_agent=single_agent)
    config = line.config
    name = run_name(line.setting, line.changed)
    announce(config, name)
    if line.run is not None:
        announce_files(line.run, config, line.changed, callbacks=True)

    # The task first: a mistake in a reward file is reported before torch is imported, which takes seconds.
    task = kind.make_task(config)
    held_out = kind.held_out_rows(config) if config.eval_every else None
    if held_out is not None:
        task.check_rows(held_out)

    from cory import CoryTrainer, make_agents
    from cory.callbacks.load import load_callbacks

    callbacks = load_callbacks(config.callbacks)
    agents = make_agents(config)
    CoryTrainer(config, agents, task, name, held_out, callbacks).train()


def _check_resumed_kind(kind: TaskKind[Any]) -> None:
    """Raises a UserError if the command line continues a run of another kind of task."""
    run = resumed_run(sys.argv[1:])
    run_kind = None
    if run is not None:
        # A file that cannot be read is reported where the settings are.
        with suppress(UserError):
            run_kind = kind_of_run(read_settings(run))
    if run_kind is None or run_kind.name == kind.name:
        return
    command = "the command that has started it"
    if run_kind is OWN:
        command = f"python -m cory.train --resume {shlex.quote(str(run))}"
    raise UserError(
        f"resume: expected a run of the task {kind.name}, got {str(run)!r}, one of {run_kind.name}. "
        f"To continue it: {command}"
    )


def announce(config: Config, name: str) -> None:
    """The first line of a run, before the libraries are loaded, which takes seconds.

    Raises a UserError if its tracker is missing.
    """
    config.check_tracker()
    if os.environ.get("RANK", "0") == "0":
        names = dict.fromkeys(
            config.of_agent(index).model.name for index in range(config.cory.num_agents)
        )
        models = " and ".join(names)
        iterations = counted(config.iterations, "iteration")
        print(f"{name}: {config.method()}, model {models}, {iterations}. Loading ...", flush=True)


def run() -> None:
    train(OWN)


if __name__ == "__main__":
    main(run)
