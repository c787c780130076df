"""Uploads an ended run to the Hugging Face Hub: agents, tokenizers, curves and a model card, and nothing else.

Every file that is uploaded is in `contents`. A commit is made at once or not at all, and holds only the files that
differ, so an upload that was interrupted, or a run that was evaluated since, is pushed again by the same command.
"""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from cory.config import Config, HubConfig
from cory.errors import UserError, expect
from cory.evaluation.agents import run_agents
from cory.evaluation.folder import trained
from cory.push.card import is_absolute, is_folder, licence_of, run_card
from cory.run.record import read_settings

# What a folder of an agent may hold of Hugging Face's and PEFT's files. Its own README.md is not uploaded.
AGENT_FILES = re.compile(
    r"config\.json|generation_config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|adapter_config\.json|adapter_model\.safetensors|tokenizer\.json|tokenizer_config\.json"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|tokenizer\.model|spiece\.model"
    r"|sentencepiece\.bpe\.model|chat_template\.jinja"
)
REDUCED = ("config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json")


def push(run: Path, config: Config, hub: HubConfig, evaluation: Path | None = None) -> str:
    """Uploads a run to `hub.push`, which is made where it is missing; returns its address.

    Args:
        config: the run's settings. evaluation: folder of its evaluation; None: the newest one beside the run, if any.

    Raises a UserError: the run has not ended, there is no token, the repository is public and `hub.public` is off, or
    the Hub refuses or cannot be reached. The run's folder is only read.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    assert hub.push is not None
    hub.check_token()
    files = contents(run, config, hub, evaluation)
    api = HfApi()
    try:
        api.create_repo(hub.push, private=not hub.public, exist_ok=True)
        private = api.repo_info(hub.push).private
        if not private and not hub.public:
            raise UserError(f"hub.push: expected a private repository, or --public, got {hub.push!r}, which is public")
        if private and hub.public:
            api.update_repo_settings(hub.push, private=False)
        there = [name for name in api.list_repo_files(hub.push) if re.match(r"agent_\d+/", name)]
        operations: list[Any] = [CommitOperationDelete(name) for name in there if name not in files]
        operations += [CommitOperationAdd(name, content) for name, content in files.items()]
        api.create_commit(hub.push, operations, commit_message=f"Upload {run.name}")
    except UserError:
        raise
    except Exception as error:  # the HTTP library underneath, and so its errors, differs between versions
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise UserError(f"hub.push: the upload to {hub.push!r} failed, and can be repeated: {reason}") from None
    return f"{api.endpoint}/{hub.push}"


def contents(run: Path, config: Config, hub: HubConfig, evaluation: Path | None = None) -> dict[str, Path | bytes]:
    """All that is uploaded: by the name in the repository a file of the run, or what is written for the upload.

    Of absolute paths in the agents' JSON files the last part is left. Says on stderr what others will miss: a base that
    is a local folder, files of an agent that are not uploaded. Raises a UserError if the run has not ended.
    """
    agents = run_agents(run)
    expect(bool(agents), "run", "the folder of a run that has ended, with its agents", str(run))
    settings = read_settings(run)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    bases: list[str] = []  # by agent
    unknown: list[str] = []  # those that others cannot load
    licence: dict[str, str] = {}
    files: dict[str, Path | bytes] = {}
    for index, folder in enumerate(agents.values()):
        name = config.of_agent(index).model.name
        local = is_folder(config, name)
        shown = (hub.base or Path(name).name) if local else name
        licence = licence or licence_of(config.resolve(name)) or (licence_of(hub.base) if hub.base else {})
        bases.append(shown)
        if local and hub.base is None and shown not in unknown:
            unknown.append(shown)
        for file in sorted(folder.iterdir()):
            if AGENT_FILES.fullmatch(file.name) and file.is_file():
                files[f"{folder.name}/{file.name}"] = _reduced(file, shown) if file.name in REDUCED else file
            elif file.name != "README.md":
                print(f"Not uploaded: {file}, which is not a file of a model or tokenizer.", file=sys.stderr)
    if unknown:
        used = "can load the adapters" if config.lora.rank and not config.lora.merge else "can follow a link to it"
        print(
            f"The base {unknown[0]!r} is a local folder, so nobody else {used}. --base names it on the Hub.",
            file=sys.stderr,
        )
    results = _evaluation(run, evaluation)
    repository = hub.push or f"user/{run.name}"
    card = run_card(repository, config, settings, summary, bases, unknown, licence, results)
    return {"README.md": card.encode(), "curves.png": run / "curves.png", **files}


def _reduced(file: Path, base: str) -> Path | bytes:
    """A JSON file without absolute paths, where it has any; `base` takes the place of an adapter's base."""
    content = json.loads(file.read_text(encoding="utf-8"))
    reduced = {key: value for key, value in content.items()}
    if "base_model_name_or_path" in reduced:
        reduced["base_model_name_or_path"] = base
    for key, value in reduced.items():
        if isinstance(value, str) and is_absolute(value) and re.search("path|file|dir|name", key):
            reduced[key] = Path(value).name
    return file if reduced == content else json.dumps(reduced, indent=2).encode()


def _evaluation(run: Path, folder: Path | None) -> dict[str, Any] | None:
    """The run's evaluation: the rows of its agents and of the base. Raises a UserError if `folder` holds none."""
    mine = trained([str(run)]).get(str(run))
    beside = [file.parent for file in run.parent.glob("*/evaluation.json")]
    for place in (
        [folder] if folder else sorted(beside, key=lambda path: (path / "evaluation.json").stat().st_mtime)[::-1]
    ):
        with suppress(OSError, ValueError, LookupError):
            ends = json.loads((place / "settings.json").read_text(encoding="utf-8"))["trained"]
            results = json.loads((place / "evaluation.json").read_text(encoding="utf-8"))
            names = [Path(model).name for model, end in ends.items() if end == mine]
            rows = [row for row in results["rows"] if row["name"].split("/")[0] in names or row["name"] == "base"]
            if names and len(rows) > 1:
                short = [row | {"name": row["name"].removeprefix(f"{names[0]}/")} for row in rows]
                return {**results, "rows": short}
    if folder:
        raise UserError(f"evaluation: expected the folder of an evaluation of {run} as it is, got {str(folder)!r}")
    return None
