"""Model cards: of one saved agent, and of a run that is passed on. Model text acts neither as Markdown nor as HTML."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from cory.config import Config
from cory.prompts import RolePrompts
from cory.push.paths import without_paths
from cory.push.use import Source, fenced, fixed_roles, how_to_use, is_adapter
from cory.report.tables import interval_cell, markdown_table, sample_table
from cory.run.record import yaml_text

HERE = Path(__file__).parent
PAPER = "https://arxiv.org/abs/2410.06101"
CITATION = """@inproceedings{ma2024coevolving,
  title     = {Coevolving with the Other You: Fine-Tuning {LLM} with Sequential Cooperative Multi-Agent Reinforcement Learning},
  author    = {Ma, Hao and Hu, Tianyi and Pu, Zhiqiang and Liu, Boyin and Ai, Xiaolin and Liang, Yanyan and Chen, Min},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
  url       = {https://arxiv.org/abs/2410.06101}
}"""  # noqa: E501


def agent_card(
    agent: str,
    config: Config,
    iterations: int,
    means: Mapping[str, Mapping[str, float]],
    fingerprint: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
) -> str:
    """The README.md of an agent's folder.

    Args:
        agent: its name.
        config: the run's settings.
        iterations: that were done, which are fewer than planned where the run was ended early.
        means: by metric, `start` and `end` of training.
        fingerprint: of the run's config.yaml.
        samples: of the run, of which the first query is an example.
    """
    index = int(agent.removeprefix("agent_")) - 1
    of_agent = config.of_agent(index)
    roles = fixed_roles(config, index)
    header = ModelCardData(base_model=of_agent.model.name, **_header(config, of_agent))
    rows = [
        [metric, f"{values['start']:.3f}", f"{values['end']:.3f}"]
        for metric, values in means.items()
    ]
    card = ModelCard.from_template(
        header,
        template_path=str(HERE / "agent_card.md.jinja"),
        agent=agent,
        base=of_agent.model.name,
        trained=config.is_trained(index),
        method=config.method(),
        iterations=iterations,
        use=how_to_use(
            config, {agent: Source(f'"path/to/{agent}"')}, fingerprint, samples, roles or None
        ),
        note=_note_on_roles(config, roles),
        means=markdown_table(["metric", "start", "end"], rows),
        settings=fenced(yaml_text(asdict(of_agent)), "yaml"),
        paper=PAPER,
        citation=fenced(CITATION, "bibtex"),
    )
    return str(card)


def _note_on_roles(config: Config, roles: Sequence[int]) -> str:
    """What the code of an agent's card does not show of the run's chain.

    Args:
        config: the run's settings.
        roles: those of the agent, if they are fixed.
    """
    is_chain = config.cory.num_roles > 1 and config.cory.num_agents > 1
    reads_others = is_chain and config.cory.knowledge_transfer
    if roles:
        prompts = RolePrompts(roles=tuple(config.roles))
        names = ", ".join(prompts.name(role) for role in roles)
        note = f"In the run the agent had {'this role' if len(roles) == 1 else 'these roles'} alone: {names}."
        if reads_others and roles[-1] > 0:
            note += " The code quotes what other agents answered before it."
        return note
    if reads_others:
        return "Here the agent answers after itself; in the run an observer reads another agent's response."
    return ""


def run_card(
    repository: str,
    config: Config,
    settings: Mapping[str, Any],
    summary: Mapping[str, Any],
    bases: Sequence[str],
    local_bases: Sequence[str] = (),
    licence: Mapping[str, str] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    has_curves: bool = True,
) -> str:
    """The README.md of a repository with the agents of a run.

    Args:
        repository: user/name.
        config: the run's settings.
        settings: the contents of its config.yaml.
        summary: of its summary.json.
        bases: the base model of each agent.
        local_bases: those of them that are not on the Hub.
        licence: the fields `license`, `license_name`, `license_link` of the base's card.
        evaluation: of the run's evaluation.json, whose rows are the run's agents and the bases.
        has_curves: whether curves.png is in the repository.
    """
    on_hub = [base for base in dict.fromkeys(bases) if base not in local_bases]
    dataset = _dataset_on_hub(settings)
    fields: dict[str, Any] = {**_header(config, config), **(licence or {})}
    header = ModelCardData(
        base_model=on_hub[0] if len(on_hub) == 1 else on_hub or None,
        datasets=[dataset] if dataset else None,
        model_name=repository.split("/")[1],
        **fields,
    )
    agents = list(summary["agents"])
    sources = {
        agent: Source(f'"{repository}", subfolder="{agent}"', base)
        for agent, base in zip(agents, bases, strict=True)
    }
    rows = [
        [agent, metric, f"{values['start']:.3f}", f"{values['end']:.3f}"]
        for agent, metrics in summary["agents"].items()
        for metric, values in metrics.items()
    ]
    links = [f"[{base}](https://huggingface.co/{base})" for base in on_hub]
    folders = [f"`{name}`" for name in local_bases]
    fingerprint = settings.get("fingerprint") or {}
    before = summary["samples"]["before"]
    kept_settings = yaml_text(without_paths(settings))
    card = ModelCard.from_template(
        header,
        template_path=str(HERE / "run_card.md.jinja"),
        bases=" and ".join([*links, *folders]),
        local_bases=" and ".join(folders),
        has_curves=has_curves,
        method=config.method(),
        iterations=summary["iterations"],
        agents=", ".join(agents),
        use=how_to_use(config, sources, fingerprint, before.get("chain") or before[agents[0]]),
        rows=fingerprint.get("rows"),
        source=f" of [{dataset}](https://huggingface.co/datasets/{dataset})" if dataset else "",
        reward=" and, of each chain, ".join(
            f"`{fingerprint[key]}`" for key in ("reward", "team_reward") if fingerprint.get(key)
        ),
        has_team=bool(fingerprint.get("team_reward")),
        means=markdown_table(["agent", "metric", "start", "end"], rows),
        kl_coef=f"{config.ppo.init_kl_coef:g}",
        evaluation=_held_out(evaluation) if evaluation else "",
        several_roles="chain" in before,
        reads_earlier="chain" in before and config.cory.knowledge_transfer,
        samples=fenced(sample_table(before, summary["samples"]["after"])),
        settings=fenced(kept_settings, "yaml"),
        versions=", ".join(
            f"{name} {version}" for name, version in (settings.get("versions") or {}).items()
        ),
        paper=PAPER,
        citation=fenced(CITATION, "bibtex"),
    )
    return str(card)


def licence_of(base: str, local: bool) -> dict[str, str]:
    """The licence that the card of a model states: a local folder, or a Hub id that can be reached or is cached."""
    source = Path(base) / "README.md" if local else base
    if local and not Path(source).exists():
        return {}
    data: ModelCardData | None = None
    # Without a card or a network, or with metadata that cannot be read, the card says nothing.
    with suppress(Exception):
        data = ModelCard.load(source, ignore_metadata_errors=True).data
    fields = {key: getattr(data, key, None) for key in ("license", "license_name", "license_link")}
    if not fields["license"]:
        return {}
    return {key: value for key, value in fields.items() if isinstance(value, str)}


def _header(config: Config, of_agent: Config) -> dict[str, Any]:
    tags = ["cory", config.algorithm, "reinforcement-learning"]
    if not is_adapter(of_agent):
        return {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    return {"library_name": "peft", "pipeline_tag": "text-generation", "tags": [*tags, "lora"]}


def _dataset_on_hub(settings: Mapping[str, Any]) -> str | None:
    """The id of the run's dataset, if it is one on the Hub."""
    name = (settings.get("task") or {}).get("dataset")
    if not isinstance(name, str):
        return None
    fingerprint = settings.get("fingerprint") or {}
    if fingerprint.get("dataset_is_local", Path(name).exists()):  # older runs have not recorded it
        return None
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else None


def _held_out(evaluation: Mapping[str, Any]) -> str:
    """An evaluation's table."""
    tables = []
    for titles in (evaluation["titles"], evaluation.get("costs")):
        if titles:
            cells = [
                [row["name"], *(interval_cell(row, metric) for metric in titles)]
                for row in evaluation["rows"]
            ]
            tables.append(markdown_table(["", *titles.values()], cells))
    return "\n\n".join([f"{evaluation['said']}; mean ± half-width of the 95 % interval.", *tables])
