"""Model cards: of one saved agent, and of a run that is passed on. Model text acts neither as Markdown nor as HTML."""

import re
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from cory.config import Config
from cory.provenance.models import is_local
from cory.report.tables import markdown_table, sample_table

PAPER = "https://arxiv.org/abs/2410.06101"
CITATION = """@inproceedings{ma2024coevolving,
  title     = {Coevolving with the Other You: Fine-Tuning {LLM} with Sequential Cooperative Multi-Agent Reinforcement Learning},
  author    = {Ma, Hao and Hu, Tianyi and Pu, Zhiqiang and Liu, Boyin and Ai, Xiaolin and Liang, Yanyan and Chen, Min},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
  url       = {https://arxiv.org/abs/2410.06101}
}"""  # noqa: E501
OF_THE_MACHINE = ("output", "resume", "device", "tracker", "hub", "fingerprint", "versions")  # keys left out of a card
LIMITS = """The agents were trained to raise one reward, and were not tested for anything else. A response can earn a
high reward and still be wrong or unpleasant. What holds for the base (its data, biases and licence) holds for them,
too. As pioneer an agent answers the query, as observer it needs the response of another agent in its prompt."""


def agent_card(
    agent: str,
    config: Config,
    summary: Mapping[str, Mapping[str, float]],
    fingerprint: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
) -> str:
    """The README.md of an agent's folder.

    Args:
        agent: its name. config: the run's settings. summary: by metric, `start` and `end` of training.
        fingerprint: of the run's config.yaml. samples: of the agent, of which the first query is an example.
    """
    own = config.of_agent(int(agent.removeprefix("agent_")) - 1)
    header = _header(config, own) | {"base_model": own.model.name}
    return "\n\n".join(
        part
        for part in [
            f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n# {agent}",
            f"`{own.model.name}` fine-tuned with {config.method()} for {config.iterations} iterations.",
            *_use(config, {agent: (f'"path/to/{agent}"', None)}, fingerprint, samples),
            "Here the agent answers after itself; in the run an observer reads another agent's response."
            if config.cory.roles > 1 and config.cory.num_agents > 1
            else "",
            "Means over the first and the last iterations of training, over the roles it held:",
            markdown_table(
                ["metric", "start", "end"], [[m, f"{v['start']:.3f}", f"{v['end']:.3f}"] for m, v in summary.items()]
            ),
            f"Settings:\n\n{fenced(yaml.safe_dump(asdict(own), sort_keys=False), 'yaml')}",
            f"Method: [CORY]({PAPER}).\n\n{fenced(CITATION, 'bibtex')}\n",
        ]
        if part
    )


def run_card(
    repository: str,
    config: Config,
    settings: Mapping[str, Any],
    summary: Mapping[str, Any],
    bases: Sequence[str],
    unknown: Sequence[str] = (),
    licence: Mapping[str, str] | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> str:
    """The README.md of a repository with the agents of a run.

    Args:
        repository: user/name. config: the run's settings. settings: the contents of its config.yaml.
        summary: of its summary.json. bases: the agents' base models. unknown: those of them that are not on the Hub.
        licence: the fields `license`, `license_name`, `license_link` of the base's card.
        evaluation: of the run's evaluation.json, whose rows are the run's agents and the base.
    """
    from huggingface_hub import ModelCard, ModelCardData

    data = (settings.get("task") or {}).get("dataset")
    known = isinstance(data, str) and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", data)) and not Path(data).exists()
    on_hub = [base for base in dict.fromkeys(bases) if base not in unknown]
    fields = _header(config, config) | {"base_model": on_hub[0] if len(on_hub) == 1 else on_hub or None}
    fields |= {"datasets": [data] if known else None, "model_name": repository.split("/")[1], **(licence or {})}
    made_of = settings.get("fingerprint") or {}
    source = f" of [{data}](https://huggingface.co/datasets/{data})" if known else ""
    agents = list(summary["agents"])
    places: dict[str, tuple[str, str | None]] = {}
    for agent, base in zip(agents, bases, strict=True):
        places[agent] = (f'"{repository}", subfolder="{agent}"', base)
    shown = [f"[{base}](https://huggingface.co/{base})" for base in on_hub] + [f"`{name}`" for name in unknown]
    rows = [
        [agent, metric, f"{value['start']:.3f}", f"{value['end']:.3f}"]
        for agent, metrics in summary["agents"].items()
        for metric, value in metrics.items()
    ]
    parts = [
        f"# {repository.split('/')[1]}",
        f"{' and '.join(shown)}, fine-tuned with {config.method()} ([paper]({PAPER})) for {summary['iterations']} "
        f"iterations. The folders {', '.join(agents)} hold an agent each, with its tokenizer.",
        f"The base, {' and '.join(f'`{name}`' for name in unknown)}, is not on the Hub." if unknown else "",
        "## Use",
        *_use(config, places, made_of, summary["samples"]["before"].get(agents[0], [])),
        "## Training",
        f"{made_of['rows']} queries{source}; reward: `{made_of['reward']}`." if made_of else "",
        markdown_table(["agent", "metric", "start", "end"], rows),
        "Means over the first and the last iterations. `combined_reward` is the task reward minus "
        f"{config.ppo.init_kl_coef:g} times the KL to the base.",
        "![Task reward, KL to the base and combined reward by iteration](curves.png)",
        "## Evaluation",
        _held_out(evaluation) if evaluation else "The agents were not evaluated on held-out queries.",
        "## Samples",
        "Responses to the same queries before and after training, each agent alone, with their task rewards:",
        fenced(sample_table(summary["samples"]["before"], summary["samples"]["after"])),
        f"## Limits\n\n{LIMITS}",
        "## Settings",
        fenced(yaml.safe_dump(without_paths(settings), sort_keys=False, allow_unicode=True), "yaml"),
        "Versions: " + ", ".join(f"{name} {version}" for name, version in (settings.get("versions") or {}).items()),
        f"## Citation\n\n{fenced(CITATION, 'bibtex')}",
    ]
    content = "\n\n".join(part for part in parts if part)
    return str(ModelCard(f"---\n{ModelCardData(**fields).to_yaml()}\n---\n\n{content}\n"))


def fenced(text: str, language: str = "") -> str:
    """The text as a code block, in a fence that is longer than any in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"


def is_absolute(text: str) -> bool:
    """Whether a text is a path of some machine."""
    return text.startswith(("/", "~")) or PureWindowsPath(text).is_absolute()


def without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings without what is the machine's: of absolute paths only the last part is left."""
    kept = {key: value for key, value in settings.items() if key not in OF_THE_MACHINE}
    return {key: _cut(key, value) for key, value in kept.items()}


def _cut(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {inner: _cut(inner, each) for inner, each in value.items()}
    if isinstance(value, list):
        return [_cut(key, each) for each in value]
    text = isinstance(value, str) and not key.endswith("_prompt") and key != "stop"  # those are texts
    return re.split(r"[\\/]", value.rstrip("\\/"))[-1] if text and is_absolute(value) else value


def licence_of(base: str) -> dict[str, str]:
    """The licence that the card of a model states: a folder, or a Hub id that can be reached or is cached."""
    from huggingface_hub import ModelCard

    data: Any = None
    with suppress(Exception):  # no card, no network, metadata that cannot be read: the card says nothing
        place = Path(base) / "README.md" if Path(base).is_dir() else base
        data = ModelCard.load(place, ignore_metadata_errors=True).data
    fields = {key: getattr(data, key, None) for key in ("license", "license_name", "license_link")}
    return {key: value for key, value in fields.items() if isinstance(value, str)} if fields["license"] else {}


def _is_adapter(own: Config) -> bool:
    return own.lora.rank > 0 and not own.lora.merge


def _header(config: Config, own: Config) -> dict[str, Any]:
    adapter = _is_adapter(own)
    tags = ["cory", config.algorithm, "reinforcement-learning", *(["lora"] if adapter else [])]
    return {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation", "tags": tags}


def is_folder(config: Config, name: str) -> bool:
    """Whether a model of a run is a local folder, or a built-in model, and so not on the Hub."""
    return config.resolve(name) != name or is_local(name) or Path(name).exists()


def _use(
    config: Config,
    places: Mapping[str, tuple[str, str | None]],
    fingerprint: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Code that loads the agents and asks them, one after the other, as the run does; and what else that needs.

    Args:
        config: the run's settings.
        places: by agent the arguments of from_pretrained, and its base as others know it; None: as the run names it.
        fingerprint: of the run's config.yaml. samples: of the run; the first query is the example.
    """
    imports = {"from transformers import AutoModelForCausalLM, AutoTokenizer"}
    lines: list[str] = []
    notes: list[str] = []
    for agent, (place, known_as) in places.items():
        index = int(agent.removeprefix("agent_")) - 1
        own = config.of_agent(index)
        if _is_adapter(own):
            key = f"agents[{index}].model.name" if config.agents else "model.name"
            model = (fingerprint.get("models") or {}).get(key) or {}
            base, needed, note = _base(config, own, known_as, model.get("identity") or "")
            imports |= {"from peft import PeftModel", *needed}
            notes.append(note)
            lines.append(f"base = {base}")
            lines.append(f"{agent} = PeftModel.from_pretrained(base, {place})")
        else:
            lines.append(f"{agent} = AutoModelForCausalLM.from_pretrained({place})")
        lines.append(f"{agent.replace('agent', 'tokenizer')} = AutoTokenizer.from_pretrained({place})")
    prompts = fingerprint.get("prompts") or {}
    if prompts:
        lines += _asking(config, list(places), prompts, samples)
    parts = [*dict.fromkeys(filter(None, notes)), fenced("\n".join([*sorted(imports), "", *lines]), "python")]
    if prompts:
        parts.append("What each role reads:\n\n" + fenced(yaml.safe_dump(dict(prompts), sort_keys=False), "yaml"))
    return parts


def _base(config: Config, own: Config, known_as: str | None, identity: str) -> tuple[str, set[str], str]:
    """Code that loads an adapter's base as the run did, the imports that it needs, and a sentence where it is a folder.

    `AutoPeftModelForCausalLM` would look for the base in the agent's subfolder, too.
    """
    name, imports, note = own.model.name, set(), ""
    options = f', dtype="{own.model.dtype}"' + ", trust_remote_code=True" * own.model.trust_remote_code
    where = f'"{name}"'
    if not is_folder(config, name):
        revision = identity.removeprefix("commit:") if identity.startswith("commit:") else own.model.revision
        if revision:
            where += f', revision="{revision}"'
    elif known_as is not None and "/" in known_as:  # `hub.base`
        where = f'"{known_as}"'
    elif config.resolve(name) != name:
        kind = type(config)
        package = kind.__module__.partition(".")[0]
        imports.add(f"from {kind.__module__} import {kind.__name__}")
        where = f'{kind.__name__}().resolve("{name}")'
        note = (
            f"The base `{name}` is a model of the toy setting: a folder of the package `{package}` of cory, which the "
            "code imports: run it in a checkout, or where that is installed."
        )
    elif known_as is None:
        note = f"The base `{name}` is a local folder of the machine on which the run was trained."
    else:
        where = f'"path/to/{known_as}"'
        note = (
            f"The base `{known_as}` is a folder of the machine on which the run was trained. Adapters need that model."
        )
    loader = "AutoModelForCausalLM"
    merged = ""
    if (Path(config.resolve(name)) / "adapter_config.json").exists():  # an adapter, which the run has merged
        loader, merged = "AutoPeftModelForCausalLM", ".merge_and_unload()"
        imports.add("from peft import AutoPeftModelForCausalLM")
    return f"{loader}.from_pretrained({where}{options}){merged}", imports, note


def _asking(
    config: Config, agents: Sequence[str], prompts: Mapping[str, str], samples: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Lines of code that let the agents answer a query in their roles, with the run's prompts and sampling."""
    sampling, template = config.sampling, config.of_agent(int(agents[0].removeprefix("agent_")) - 1).model.chat_template
    example = samples[0] if samples else {"query": "...", "prompt": ""}
    columns = {"prompt": example["query"]}
    for template_of_role in prompts.values():
        for _, name, _, _ in string.Formatter().parse(template_of_role):
            if name not in (None, "prompt", "response"):
                columns[name] = "..."
    lines = ["", "def respond(model, tokenizer, prompt):"]
    if template not in (False, None) or isinstance(example["prompt"], list):
        before = example["prompt"][:-1] if isinstance(example["prompt"], list) else []
        options = "".join(f", {key}={value!r}" for key, value in template.items()) if isinstance(template, dict) else ""
        lines += [
            f"    turns = [{''.join(f'{turn!r}, ' for turn in before)}{{'role': 'user', 'content': prompt}}]",
            "    inputs = tokenizer.apply_chat_template(",
            f"        turns, add_generation_prompt=True, return_dict=True, return_tensors='pt'{options}",
            "    )",
        ]
    else:
        lines.append('    inputs = tokenizer(prompt, return_tensors="pt")')
    lines += [
        "    tokens = model.generate(",
        f"        **inputs, do_sample=True, max_new_tokens={sampling.max_new_tokens},",
        f"        temperature={sampling.temperature}, top_k={sampling.top_k}, top_p={sampling.top_p}, "
        f"repetition_penalty={sampling.repetition_penalty},",
        "    )",
        '    text = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)',
    ]
    if sampling.stop:
        lines += [f"    for stop in {list(sampling.stop)!r}:", "        text = text.split(stop)[0]"]
    lines += ["    return text", "", ""]
    lines += [f"{role}_prompt = {prompts[role]!r}" for role in ("pioneer", "observer")[: min(2, config.cory.roles)]]
    lines.append(f"query = {columns!r}")
    for role in range(config.cory.roles):
        agent = agents[role % len(agents)]
        reads = role > 0 and config.cory.knowledge_transfer
        filled = "observer_prompt.format(**query, response=response)" if reads else "pioneer_prompt.format(**query)"
        lines.append(f"response = respond({agent}, {agent.replace('agent', 'tokenizer')}, {filled})")
    return [*lines, "print(response)"]


def _held_out(evaluation: Mapping[str, Any]) -> str:
    titles = {key: title for key, title in evaluation["titles"].items() if all(key in r for r in evaluation["rows"])}
    rows = [
        [row["name"], *(f"{row[key]:.3f} ± {row[f'{key}_ci']:.3f}" for key in titles)] for row in evaluation["rows"]
    ]
    return f"{evaluation['said']}; mean ± half-width of the 95 % interval.\n\n" + markdown_table(
        ["", *titles.values()], rows
    )
