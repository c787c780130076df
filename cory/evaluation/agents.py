"""The saved agents of a run, and how they are loaded. Importing this does not import torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cory.config import Config, ModelConfig, changed
from cory.errors import UserError
from cory.task_kinds import run_config


class Weights(NamedTuple):
    """How a model is loaded (`load` in cory/evaluation/responses.py).

    Args:
        model: its settings.
        adapter: the folder of an adapter on it, or None.
        base: the model to which its KL is measured.
    """

    model: ModelConfig
    adapter: Path | None
    base: ModelConfig


def run_agents(folder: Path) -> dict[str, Path]:
    """A run's saved agents, named RUN/agent_1, ...; empty if it is no run. Raises a UserError if it has not ended.

    Without a summary it has not ended, whatever agents lie there: they may be those of a run that has gone back since.
    """
    if not (folder / "config.yaml").exists():
        return {}
    agents = agent_folders(folder)
    if not agents or not (folder / "summary.json").exists():
        raise UserError(
            f"{folder}: expected a run with saved agents, got one that has not ended (--resume continues it)"
        )
    return agents


def agent_folders(folder: Path) -> dict[str, Path]:
    """The agents in a folder, in their order: by their names in an evaluation, FOLDER/agent_1, ..."""
    agents = [path for path in folder.glob("agent_*") if path.is_dir() and path.name[6:].isdigit()]
    agents.sort(key=lambda path: int(path.name[6:]))
    return {f"{folder.name}/{agent.name}": agent for agent in agents}


def agent_weights(
    agents: Mapping[str, Path], config: Config, changes: Mapping[str, Any]
) -> dict[str, Weights]:
    """How saved agents are loaded, by name. KL is to the model that a trained agent started from.

    That of a frozen agent is to `base_of_saved`, what it is a saved agent of.

    Args:
        agents: their folders, by name.
        config: the settings of their run.
        changes: to the `model` block of each of them.
    """
    weights = {}
    for name, folder in agents.items():
        index = int(folder.name.removeprefix("agent_")) - 1
        model = config.of_agent(index).model
        base = changed(replace(model, name=config.resolve(model.name)), changes)
        if (folder / "adapter_config.json").exists():
            weights[name] = Weights(base, folder, base)
        else:
            full_model = replace(base, name=str(folder), revision=None, quantization="none")
            if not config.is_trained(index):
                base = changed(base_of_saved(base), changes)
            weights[name] = Weights(full_model, None, base)
    return weights


def base_of_saved(model: ModelConfig) -> ModelConfig:
    """The model from which a saved agent was trained, by the config.yaml of its run; another model is its own base.

    An agent that was frozen in its run, too, has the base that it has there.
    """
    folder = Path(model.name)
    number = folder.name.removeprefix("agent_")
    run = folder.parent
    if number == folder.name or not number.isdigit() or not (run / "config.yaml").is_file():
        return model
    config = run_config(run)
    index = int(number) - 1
    base = config.of_agent(index).model
    base = replace(base, name=config.resolve(base.name), chat_template=model.chat_template)
    return base if config.is_trained(index) else base_of_saved(base)
