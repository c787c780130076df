"""The model card of saved agents."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from cory.config import Config
from cory.errors import counted
from cory.identity import is_local
from cory.roles import RolePrompts
from cory.run.folder import agent_index
from cory.run.tables import markdown, printable
from cory.settings import yaml_text

PAPER = "https://arxiv.org/abs/2410.06101"


def model_card(
    agents: Mapping[str, Path],
    config: Config,
    fingerprint: Mapping[str, Any],
    iterations: int,
    repository: str | None = None,
) -> str:
    """A README.md for saved agents. It names no path of this machine; texts in it act neither as Markdown nor as HTML.

    Args:
        agents: their folders, by name.
        config: the run's settings.
        fingerprint: of the run's config.yaml.
        iterations: that were done.
        repository: user/name, whose subfolders the agents are. None: the card is for the folder of a single agent.
    """
    has_adapter = any(map(is_adapter, agents.values()))
    origins = []
    on_hub: dict[str, None] = {}  # each once
    for agent in agents:
        base, is_folder = base_of(agent, config)
        how = "trained from" if config.is_trained(agent_index(agent)) else "not trained, a copy of"
        where = " (a local folder, not on the Hub)" if is_folder else ""
        origins.append(f"* {agent}: {how} {markdown(base)}{where}")
        if not is_folder:
            on_hub[base] = None
    header = ModelCardData(
        base_model=list(on_hub) or None,
        library_name="peft" if has_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["cory", config.algorithm, "reinforcement-learning"],
    )

    method = f"{config.method()} ([paper]({PAPER})), {counted(iterations, 'iteration')}"
    if config.cory.num_roles > 1:
        method += f", credit {config.cory.credit}, weight {config.cory.weight:g}"

    task = f"{markdown(str(fingerprint.get('rows')))} rows"
    dataset = getattr(getattr(config, "task", None), "dataset", None)
    if dataset:
        task += f" of {markdown(Path(dataset).name)}"
    rewards = [fingerprint[key] for key in ("reward", "team_reward") if fingerprint.get(key)]
    task += f", reward {markdown(' and '.join(rewards))}"

    prompts = RolePrompts(roles=tuple(config.roles))  # for the names: no file of theirs is run
    of_task = fingerprint.get("prompts") or {}
    templates = {}
    for role in range(config.cory.num_roles):
        read = role if config.cory.knowledge_transfer else 0
        template = prompts.settings(read).prompt or of_task.get("observer" if read else "pioneer")
        templates[prompts.name(role)] = template or "a function"

    code = ["from peft import PeftModel"] if has_adapter else []
    code += ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    for agent, folder in agents.items():
        code += _loading(agent, folder, config, repository)
    parts = [
        f"# {repository or next(iter(agents))}",
        "\n".join(origins),
        f"Method: {method}.",
        f"Task: {task}.",
        "## Load",
        "\n".join(["```python", *code, "```"]),
        "## Prompts of the roles",
        # Indented code, as no text in it ends it.
        textwrap.indent(printable(yaml_text(templates)), "    "),
    ]
    text = "\n\n".join(parts)
    return str(ModelCard(f"---\n{header.to_yaml()}\n---\n\n{text}\n"))


def base_of(agent: str, config: Config) -> tuple[str, bool]:
    """The model that an agent started from: a Hub id, or the name of a local folder; and whether it is the latter."""
    name = config.of_agent(agent_index(agent)).model.name
    is_folder = is_local(name) or Path(config.resolve(name)).is_dir()
    return Path(name).name if is_folder else name, is_folder


def is_adapter(agent: Path) -> bool:
    return (agent / "adapter_config.json").exists()


def _loading(agent: str, folder: Path, config: Config, repository: str | None) -> list[str]:
    """Lines of Python that load an agent and its tokenizer."""
    where = f'"{repository}", subfolder="{agent}"' if repository else f'"path/to/{agent}"'
    tokenizer = f"{agent.replace('agent', 'tokenizer')} = AutoTokenizer.from_pretrained({where})"
    if not is_adapter(folder):
        return [f"{agent} = AutoModelForCausalLM.from_pretrained({where})", tokenizer]
    name, is_folder = base_of(agent, config)
    base = json.dumps(f"path/to/{name}" if is_folder else name)
    dtype = config.of_agent(agent_index(agent)).model.dtype
    return [
        f'base = AutoModelForCausalLM.from_pretrained({base}, dtype="{dtype}")',
        f"{agent} = PeftModel.from_pretrained(base, {where})",
        tokenizer,
    ]
