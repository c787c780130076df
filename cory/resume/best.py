"""The folder of a run's best agents, which is no run to continue. Importing this does not import torch."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path

from cory.cli import invocation
from cory.config import AgentConfig, Config
from cory.errors import UserError
from cory.run.record import named, run_of_best


def check_resumed(config: Config) -> None:
    """Raises a UserError if `config.resume` is the folder of a run's best agents.

    Args:
        config: its settings are those of the run.
    """
    if config.resume is None:
        return
    best = named(Path(config.resume))
    run = run_of_best(best)
    if run is None:
        return
    flags = f"--config {shlex.quote(str(run / 'config.yaml'))} {_agents_of(config, best)}"
    commands = [f"--resume {shlex.quote(str(run))}", flags]
    if invocation.from_command_line:
        commands = [f"{invocation.command()} {flags}" for flags in commands]
    resume, new = commands
    raise UserError(
        f"resume: expected the folder of a run, got {str(best)!r}, which holds the best agents of {str(run)!r} and no "
        f"checkpoints.\nTo continue the run: {resume}\nA new run that begins with these agents: {new}"
    )


def _agents_of(config: Config, best: Path) -> str:
    """The flag that begins a run with the agents of a folder."""
    if config.cory.num_agents == 1 and not config.agents:  # an entry's name goes before model.name
        return f"--model.name {shlex.quote(str(best / 'agent_1'))}"
    entries = []
    for index in range(config.cory.num_agents):
        agent = config.agents[index] if config.agents else AgentConfig()
        settings = asdict(agent)
        settings["model"]["name"] = str(best / f"agent_{index + 1}")
        defaults = asdict(AgentConfig())
        entries.append({key: x for key, x in settings.items() if x != defaults[key]})
    return f"--agents {shlex.quote(json.dumps(entries))}"
