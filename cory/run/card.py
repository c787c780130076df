"""Model cards: of one saved agent, and of a run that is passed on. Model text acts neither as Markdown nor as HTML."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from cory.config import Config
from cory.run.report import markdown_table, sample_table

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


def agent_card(agent: str, config: Config, summary: Mapping[str, Mapping[str, float]]) -> str:
    """The README.md of an agent's folder. `summary`: by metric, `start` and `end` of training."""
    own = config.of_agent(int(agent.removeprefix("agent_")) - 1)
    header = _header(config, own) | {"base_model": own.model.name}
    return "\n\n".join(
        [
            f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n# {agent}",
            f"`{own.model.name}` fine-tuned with {config.method()} for {config.iterations} iterations.",
            _loading(config, {agent: (f'"path/to/{agent}"', own.model.name)}),
            "Means over the first and the last iterations of training, over the roles it held:",
            markdown_table(
                ["metric", "start", "end"], [[m, f"{v['start']:.3f}", f"{v['end']:.3f}"] for m, v in summary.items()]
            ),
            f"Settings:\n\n{fenced(yaml.safe_dump(asdict(own), sort_keys=False), 'yaml')}",
            f"Method: [CORY]({PAPER}).\n\n{fenced(CITATION, 'bibtex')}\n",
        ]
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
    prompts = made_of.get("prompts") or {}
    agents = list(summary["agents"])
    places = {agent: (f'"{repository}", subfolder="{agent}"', base) for agent, base in zip(agents, bases, strict=True)}
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
        _loading(config, places),
        "What each role reads:\n\n" + fenced(yaml.safe_dump(dict(prompts), sort_keys=False), "yaml") if prompts else "",
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


def _loading(config: Config, places: Mapping[str, tuple[str, str]]) -> str:
    """Code that loads the agents; `places`: by agent the arguments of from_pretrained, and its base.

    `AutoPeftModelForCausalLM` would look for the base in the agent's subfolder, too.
    """
    lines, imports = [], {"from transformers import AutoModelForCausalLM, AutoTokenizer"}
    for agent, (place, base) in places.items():
        if _is_adapter(config.of_agent(int(agent.removeprefix("agent_")) - 1)):
            imports.add("from peft import PeftModel")
            lines.append(f'base = AutoModelForCausalLM.from_pretrained("{base}")')
            lines.append(f"{agent} = PeftModel.from_pretrained(base, {place})")
        else:
            lines.append(f"{agent} = AutoModelForCausalLM.from_pretrained({place})")
        lines.append(f"{agent.replace('agent', 'tokenizer')} = AutoTokenizer.from_pretrained({place})")
    return fenced("\n".join([*sorted(imports), "", *lines]), "python")


def _held_out(evaluation: Mapping[str, Any]) -> str:
    titles = {key: title for key, title in evaluation["titles"].items() if all(key in r for r in evaluation["rows"])}
    rows = [
        [row["name"], *(f"{row[key]:.3f} ± {row[f'{key}_ci']:.3f}" for key in titles)] for row in evaluation["rows"]
    ]
    return f"{evaluation['said']}; mean ± half-width of the 95 % interval.\n\n" + markdown_table(
        ["", *titles.values()], rows
    )
