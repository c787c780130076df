"""The folder that is passed on: agents, tokenizers, curves and a model card of an ended run, and nothing else."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cory.config import Config, HubConfig
from cory.errors import UserError
from cory.evaluation.agents import run_agents
from cory.evaluation.folder import trained
from cory.push.card import licence_of, run_card
from cory.push.paths import is_absolute, last_part
from cory.push.use import is_adapter, is_folder, recorded_identity
from cory.run.record import read_settings

# What a folder of an agent may hold of Hugging Face's and PEFT's files. Its own README.md is not passed on.
AGENT_FILES = re.compile(
    r"config\.json|generation_config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|adapter_config\.json|adapter_model\.safetensors|tokenizer\.json|tokenizer_config\.json"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|tokenizer\.model|spiece\.model"
    r"|sentencepiece\.bpe\.model|chat_template\.jinja"
)
WITH_PATHS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer_config.json",
)


@dataclass
class Bases:
    """The base models of a run's agents, as others know them.

    Args:
        names: of each agent: a Hub id, or the name of a folder.
        local: those that nobody else can load.
        licence: of the first that states one.
    """

    names: list[str] = field(default_factory=list)
    local: list[str] = field(default_factory=list)
    licence: dict[str, str] = field(default_factory=dict)


def stage(
    folder: Path,
    run: Path,
    config: Config,
    hub: HubConfig,
    evaluation: Path | None = None,
    place: Callable[[Path, Path], object] = shutil.copy,
) -> None:
    """Fills an empty folder with what is passed on.

    Of absolute paths in the agents' JSON files the last part is left. Says on stderr what others
    will miss: a base that is a local folder, files of an agent that are not passed on.

    Args:
        folder: the empty one.
        run: a run's folder, which is only read.
        config: the run's settings.
        hub: names the repository, and the base where that is a local folder.
        evaluation: folder of the run's evaluation; None: the newest one beside the run, if any.
        place: puts a file (first argument) into the folder (second argument).

    Raises a UserError: the run has not ended, `evaluation` is none of it, or
    its agents have different local bases and `hub.base` names one.
    """
    agents = run_agents(run)
    if not agents:
        raise UserError(
            f"run: expected the folder of a run that has ended, with its agents, got {str(run)!r}"
        )
    settings = read_settings(run)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    results = _evaluation(run, evaluation)
    bases = _bases(config, hub, len(agents), settings.get("fingerprint") or {})
    _warn_of_local_bases(bases, config)

    repository = hub.push or f"user/{run.name}"
    curves = run / "curves.png"  # there is none where it could not be drawn
    card = run_card(
        repository,
        config,
        settings,
        summary,
        bases.names,
        bases.local,
        bases.licence,
        results,
        has_curves=curves.exists(),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    if curves.exists():
        place(curves, folder / curves.name)
    for agent, base in zip(agents.values(), bases.names, strict=True):
        _stage_agent(folder / agent.name, agent, base, place)


def _stage_agent(
    folder: Path, agent: Path, base: str, place: Callable[[Path, Path], object]
) -> None:
    """Puts the files of an agent into a new folder."""
    folder.mkdir()
    for file in sorted(agent.iterdir()):
        if not (AGENT_FILES.fullmatch(file.name) and file.is_file()):
            if file.name != "README.md":
                print(
                    f"Not uploaded: {file}, which is not a file of a model or tokenizer.",
                    file=sys.stderr,
                )
            continue
        text = _without_paths(file, base) if file.name in WITH_PATHS else None
        if text is None:
            place(file, folder / file.name)
        else:
            (folder / file.name).write_text(text, encoding="utf-8")


def _without_paths(file: Path, base: str) -> str | None:
    """A JSON file without absolute paths, with `base` for that of an adapter; None if it has neither."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    changed = dict(content)
    if "base_model_name_or_path" in changed:
        changed["base_model_name_or_path"] = base
    for key, value in changed.items():
        if isinstance(value, str) and is_absolute(value) and re.search("path|file|dir|name", key):
            changed[key] = last_part(value)
    return None if changed == content else json.dumps(changed, indent=2)


def _bases(
    config: Config, hub: HubConfig, num_agents: int, fingerprint: Mapping[str, Any]
) -> Bases:
    bases = Bases()
    local_names: set[str] = set()
    for index in range(num_agents):
        name = config.of_agent(index).model.name
        shown = name
        local = is_folder(config, name, recorded_identity(config, index, fingerprint))
        if local:
            local_names.add(name)
            shown = hub.base or last_part(name)
            if hub.base is None and shown not in bases.local:
                bases.local.append(shown)
        bases.names.append(shown)
        if not bases.licence:
            bases.licence = licence_of(config.resolve(name), local)
        if not bases.licence and hub.base:
            bases.licence = licence_of(hub.base, local=False)
    _check_base(hub, local_names)
    return bases


def check_base(config: Config) -> None:
    """Raises a UserError, before a run begins, if `hub.base` is to name several local bases."""
    names = [config.of_agent(index).model.name for index in range(config.cory.num_agents)]
    _check_base(config.hub, {name for name in names if is_folder(config, name, identity="")})


def _check_base(hub: HubConfig, local_names: Collection[str]) -> None:
    if hub.base and len(local_names) > 1:
        raise UserError(
            f"hub.base: expected null for agents on different local bases, {sorted(local_names)}, got {hub.base!r}"
        )


def _warn_of_local_bases(bases: Bases, config: Config) -> None:
    if bases.local:
        what = "can load the adapters" if is_adapter(config) else "can follow a link to it"
        print(
            f"The base {bases.local[0]!r} is a local folder, so nobody else {what}. --base names it on the Hub.",
            file=sys.stderr,
        )


def _evaluation(run: Path, folder: Path | None) -> Mapping[str, Any] | None:
    """The results of the run's evaluation; None if there is none. Raises a UserError if `folder` holds none."""
    if folder is not None:
        results = _results(run, folder)
        if results is None:
            raise UserError(
                f"evaluation: expected the folder of an evaluation of {run} as it is, got {str(folder)!r}"
            )
        return results
    files = sorted(
        run.parent.glob("*/evaluation.json"), key=lambda file: file.stat().st_mtime, reverse=True
    )
    for file in files:
        results = _results(run, file.parent)
        if results is not None:
            return results
    return None


def _results(run: Path, folder: Path) -> Mapping[str, Any] | None:
    """What an evaluation says of the run's agents and of the bases; None if it is not of the run as it is now."""
    try:
        ends = json.loads((folder / "settings.json").read_text(encoding="utf-8"))["trained"]
        results = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        current = trained([str(run)]).get(str(run))
        names = [Path(model).name for model, end in ends.items() if end == current]
        rows = _rows_of_run(results["rows"], names[0]) if names else []
    except (OSError, ValueError, LookupError):
        return None
    if not any(row["name"].startswith("agent_") for row in rows):
        return None
    return {**results, "rows": rows}


def _rows_of_run(rows: Sequence[Mapping[str, Any]], run: str) -> list[dict[str, Any]]:
    """The rows of a run's agents, of their chains among themselves, and of the bases, all without the run's name.

    An evaluation also has rows of other runs, and of chains with their agents.
    """
    chain = rf"{re.escape(run)}/agent_\d+( after (agent_\d+|itself))*"
    of_run = re.compile(rf"base( after itself)*|(base of )?{chain}")
    return [
        {**row, "name": row["name"].replace(f"{run}/", "")}
        for row in rows
        if of_run.fullmatch(row["name"])
    ]
