"""The part of a model card that says how to use the agents: code that loads them and asks them as the run did."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cory.config import Config, ModelConfig, SamplingConfig, role_name
from cory.prompts import RolePrompts, placeholders
from cory.provenance.models import is_local
from cory.run.record import yaml_text

ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
ENVIRONMENT.filters["repr"] = repr


@dataclass(frozen=True)
class Source:
    """Where a card's reader finds an agent.

    Args:
        arguments: of `from_pretrained`, as code.
        base: its base model as others know it; None: as the run names it.
    """

    arguments: str
    base: str | None = None


@dataclass(frozen=True)
class Base:
    """How an adapter's base is loaded.

    Args:
        code: that loads it as the run did.
        imports: that the code needs.
        note: what the reader has to know, where it is a folder.
    """

    code: str
    imports: frozenset[str]
    note: str


@dataclass(frozen=True)
class LoadedAgent:
    """An agent in the code.

    Args:
        name: variable of its model.
        tokenizer: variable of its tokenizer.
        source: where it is.
        trust: a further argument of `from_pretrained`, where the model runs code of its own.
        base: of an adapter.
        chat: options of its chat template; None: it reads plain texts.
    """

    name: str
    tokenizer: str
    source: str
    trust: str
    base: Base | None
    chat: Mapping[str, Any] | None


@dataclass(frozen=True)
class Step:
    """What one role does in the code.

    Args:
        agent: who answers. None: an agent that is not at hand, whose response is quoted.
        quoted: that response.
        variable: name of the template.
        template: what is read.
        name: of the role, by which later ones read its response.
        arguments: that fill the template in, as code.
        sampling: how the response is sampled.
    """

    agent: LoadedAgent | None
    quoted: str
    variable: str
    template: str
    name: str
    arguments: str
    sampling: SamplingConfig


def how_to_use(
    config: Config,
    sources: Mapping[str, Source],
    fingerprint: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    roles: Sequence[int] | None = None,
) -> str:
    """Markdown: code that loads the agents and asks them one after the other, and what each role
    reads.

    Args:
        config: the run's settings.
        sources: of the agents, by name.
        fingerprint: of the run's config.yaml.
        samples: of the run; the first query is the example.
        roles: that these agents hold, in order. What other roles before the last of them answer is
            quoted from the samples. None: all roles.
    """
    prompts = fingerprint.get("prompts") or {}
    nothing = {"query": "...", "columns": {}, "prompt": ""}
    sample: Mapping[str, Any] = samples[0] if samples else nothing
    is_chat = isinstance(sample["prompt"], list)
    earlier_turns = sample["prompt"][:-1] if is_chat else []

    agents = [
        _loaded_agent(config, name, source, fingerprint, is_chat)
        for name, source in sources.items()
    ]
    bases = [agent.base for agent in agents if agent.base is not None]
    imports = {"from transformers import AutoModelForCausalLM, AutoTokenizer"}
    if bases:
        imports.add("from peft import PeftModel")
    for base in bases:
        imports |= base.imports

    steps = []
    templates = {}
    if prompts:
        role_prompts = RolePrompts(**prompts, roles=tuple(config.roles))
        held = range(config.cory.num_roles) if roles is None else roles
        # The samples of a role are in the order of their queries.
        completions = {
            sample["role"]: sample["completion"] for sample in reversed(samples) if "role" in sample
        }
        for role in range(held[-1] + 1):
            agent = agents[role % len(agents)] if role in held else None
            if agent is None and not config.cory.knowledge_transfer:
                continue
            quoted = completions.get(role_prompts.name(role), "...")
            steps.append(_step(config, role_prompts, role, agent, quoted))
        templates = {step.variable: step.template for step in steps if step.agent is not None}
        query = {"prompt": sample["query"], **sample["columns"]}
    code = ENVIRONMENT.get_template("use.py.jinja").render(
        imports=sorted(imports),
        agents=agents,
        steps=steps,
        templates=templates,
        query=query if prompts else {},
        chat=agents[0].chat,
        chats_differ=any(agent.chat != agents[0].chat for agent in agents),
        earlier_turns=earlier_turns,
        sampling=config.sampling,
    )
    notes = dict.fromkeys(base.note for base in bases if base.note)
    parts = [*notes, fenced(code, "python")]
    if prompts:
        read = {
            variable.removesuffix("_prompt"): template for variable, template in templates.items()
        }
        parts.append("What each role reads:\n\n" + fenced(yaml_text(read), "yaml"))
    return "\n\n".join(parts)


def fixed_roles(config: Config, index: int) -> list[int]:
    """The roles of an agent in a chain that it shares with others and that stays as it is; else none."""
    agents = config.cory.num_agents
    if agents == 1 or config.cory.exchanges_roles:
        return []
    return list(range(index, config.cory.num_roles, agents))


def fenced(text: str, language: str = "") -> str:
    """The text as a code block, in a fence that is longer than any in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"


def is_adapter(config: Config) -> bool:
    """Whether an agent with these settings is saved as an adapter."""
    return config.lora.rank > 0


def is_folder(config: Config, name: str, identity: str) -> bool:
    """Whether a model of a run is a local folder, or a built-in model, and so not on the Hub.

    `identity`: what the run has recorded of it; empty: nothing, so that a folder is looked for here.
    """
    if config.resolve(name) != name or is_local(name):
        return True
    return identity.startswith("sha256:") if identity else Path(name).exists()


def recorded_identity(config: Config, index: int, fingerprint: Mapping[str, Any]) -> str:
    """What a run has recorded of an agent's model (`model_identity`); empty if it could not identify it."""
    key = f"agents[{index}].model.name" if config.agents else "model.name"
    recorded = (fingerprint.get("models") or {}).get(key) or {}
    return recorded.get("identity") or ""


def _loaded_agent(
    config: Config, name: str, source: Source, fingerprint: Mapping[str, Any], is_chat: bool
) -> LoadedAgent:
    """An agent as the code loads and asks it. `is_chat`: whether the queries are chat messages."""
    index = _index(name)
    of_agent = config.of_agent(index)
    base = None
    if is_adapter(of_agent):
        base = _base(config, of_agent, source.base, recorded_identity(config, index, fingerprint))
    template = of_agent.model.chat_template
    chat = None
    if isinstance(template, dict):
        chat = template
    elif template or is_chat:
        chat = {}
    return LoadedAgent(
        name=name,
        tokenizer=name.replace("agent", "tokenizer"),
        source=source.arguments,
        trust=_trust(of_agent.model),
        base=base,
        chat=chat,
    )


def _index(agent: str) -> int:
    return int(agent.removeprefix("agent_")) - 1


def _trust(model: ModelConfig) -> str:
    """A further argument of `from_pretrained`, as code, for a model that runs code of its own; else nothing."""
    return ", trust_remote_code=True" if model.trust_remote_code else ""


def _base(config: Config, of_agent: Config, known_as: str | None, identity: str) -> Base:
    """How the base of an adapter is loaded.

    `AutoPeftModelForCausalLM` would look for the base in the agent's subfolder, too.

    Args:
        config: the run's settings.
        of_agent: those of the agent.
        known_as: the base as others know it: a Hub id, or the name of a folder; None: as the run
            names it.
        identity: that the run has recorded of the base.
    """
    name = of_agent.model.name
    imports = set()
    note = ""
    where = f'"{name}"'
    if not is_folder(config, name, identity):
        revision = (
            identity.removeprefix("commit:")
            if identity.startswith("commit:")
            else of_agent.model.revision
        )
        if revision:
            where += f', revision="{revision}"'
    elif known_as is not None and "/" in known_as:  # `hub.base`
        where = f'"{known_as}"'
    elif config.resolve(name) != name:
        settings = type(config)
        package = settings.__module__.partition(".")[0]
        imports.add(f"from {settings.__module__} import {settings.__name__}")
        where = f'{settings.__name__}().resolve("{name}")'
        note = (
            f"The base `{name}` is a model of the toy setting: a folder of the package `{package}` of cory, which the "
            "code imports: run it in a checkout, or where that is installed."
        )
    elif known_as is None:
        note = f"The base `{name}` is a local folder of the machine on which the run was trained."
    else:
        where = f'"path/to/{known_as}"'
        note = (
            f"The base `{known_as}` is a folder of the machine on which the run was trained. "
            "Adapters need that model."
        )

    options = f', dtype="{of_agent.model.dtype}"{_trust(of_agent.model)}'
    is_merged_adapter = (Path(config.resolve(name)) / "adapter_config.json").exists()
    if is_merged_adapter:
        imports.add("from peft import AutoPeftModelForCausalLM")
        code = f"AutoPeftModelForCausalLM.from_pretrained({where}{options}).merge_and_unload()"
    else:
        code = f"AutoModelForCausalLM.from_pretrained({where}{options})"
    return Base(code, frozenset(imports), note)


def _step(
    config: Config, prompts: RolePrompts, role: int, agent: LoadedAgent | None, quoted: str
) -> Step:
    reads = role > 0 and config.cory.knowledge_transfer
    asked = role if reads else 0  # whose template is filled in
    template = prompts.template(asked)
    variable = f"{prompts.name(asked) if config.roles else role_name(min(asked, 1))}_prompt"

    earlier = {prompts.name(index): f"responses[{index}]" for index in range(role)}
    earlier |= {"response": "responses[-1]", "responses": '"\\n\\n".join(responses)'}
    named = dict.fromkeys(placeholders(template, variable))
    arguments = [
        "**query",
        *(f"{name}={earlier[name]}" for name in named if reads and name in earlier),
    ]
    sampling = prompts.settings(role).sampling(config.sampling)
    name = prompts.name(role)
    return Step(agent, quoted, variable, template, name, ", ".join(arguments), sampling)
