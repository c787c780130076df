"""The model card of saved agents."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from cory.config import Config
from cory.errors import counted
from cory.identity import is_adapter, is_local
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
    """Returns a README.md for saved agents, without local paths and with texts escaped for Markdown and HTML.

    Args:
        agents: the agents' folders, by name.
        config: the run's settings.
        fingerprint: the fingerprint in the run's config.yaml.
        iterations: the number of iterations trained.
        repository: user/name of a repository with the agents in subfolders. None: the card is for one agent's folder.
    """
    has_adapter = any(map(is_adapter, agents.values()))
    origins = []
    on_hub: dict[str, None] = {}  # an ordered set
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

    prompts = RolePrompts(
        roles=tuple(config.roles)
    )  # gives the roles' names without running prompt files
    task_templates = fingerprint.get("prompts") or {}
    templates = {}
    for role in range(config.cory.num_roles):
        prompt_role = role if config.cory.knowledge_transfer else 0
        default = task_templates.get("observer" if prompt_role else "pioneer")
        template = prompts.settings(prompt_role).prompt or default
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
        # Indented code cannot be ended by text inside it, unlike a fenced block.
        textwrap.indent(printable(yaml_text(templates)), "    "),
    ]
    text = "\n\n".join(parts)
    return str(ModelCard(f"---\n{header.to_yaml()}\n---\n\n{text}\n"))


def base_of(agent: str, config: Config) -> tuple[str, bool]:
    """Returns the Hub id or folder name of the model that an agent started from, and whether it is a folder."""
    name = config.of_agent(agent_index(agent)).model.name
    is_folder = is_local(name) or Path(config.resolve(name)).is_dir()
    return Path(name).name if is_folder else name, is_folder


def _loading(agent: str, folder: Path, config: Config, repository: str | None) -> list[str]:
    """Returns lines of Python that load an agent and its tokenizer."""
    where = f'"{repository}", subfolder="{agent}"' if repository else f'"path/to/{agent}"'
    tokenizer = f"{agent.replace('agent', 'tokenizer')} = AutoTokenizer.from_pretrained({where})"
    if not is_adapter(folder):
        return [f"{agent} = AutoModelForCausalLM.from_pretrained({where})", tokenizer]
    name, is_folder = base_of(agent, config)
    base = json.dumps(f"path/to/{name}" if is_folder else name)
    model = config.of_agent(agent_index(agent)).model
    revision = (
        f", revision={json.dumps(model.revision)}" if model.revision and not is_folder else ""
    )
    return [
        f'base = AutoModelForCausalLM.from_pretrained({base}{revision}, dtype="{model.dtype}")',
        f"{agent} = PeftModel.from_pretrained(base, {where})",
        tokenizer,
    ]
