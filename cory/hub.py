"""Shares the agents of a run on the Hugging Face Hub, with a model card: docs/quick_start.md.

    python -m cory.hub runs/imdb_cory_tiny user/name               # private
    python -m cory.hub runs/imdb_cory_tiny user/name --public      # for everybody
    python -m cory.hub runs/imdb_cory_tiny user/name --look        # writes what would be uploaded, and uploads nothing

Needs a token: `hf auth login`, or HF_TOKEN.
"""

import json
import re
import shutil
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData

from cory.command import Arguments, main
from cory.config import Config
from cory.errors import UserError, counted
from cory.identity import is_local
from cory.roles import RolePrompts
from cory.run.folder import agent_index, finished_iterations, run_agents
from cory.run.settings import named, read_settings
from cory.run.tables import markdown, one_line, printable
from cory.settings import yaml_text
from cory.task_kinds import run_config

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
    has_adapter = any(map(_is_adapter, agents.values()))
    origins = []
    on_hub: dict[str, None] = {}  # each once
    for agent in agents:
        base, is_folder = _base(agent, config)
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


def _base(agent: str, config: Config) -> tuple[str, bool]:
    """The model that an agent started from: a Hub id, or the name of a local folder; and whether it is the latter."""
    name = config.of_agent(agent_index(agent)).model.name
    is_folder = is_local(name) or Path(config.resolve(name)).is_dir()
    return Path(name).name if is_folder else name, is_folder


def _is_adapter(agent: Path) -> bool:
    return (agent / "adapter_config.json").exists()


def _loading(agent: str, folder: Path, config: Config, repository: str | None) -> list[str]:
    """Lines of Python that load an agent and its tokenizer."""
    where = f'"{repository}", subfolder="{agent}"' if repository else f'"path/to/{agent}"'
    tokenizer = f"{agent.replace('agent', 'tokenizer')} = AutoTokenizer.from_pretrained({where})"
    if not _is_adapter(folder):
        return [f"{agent} = AutoModelForCausalLM.from_pretrained({where})", tokenizer]
    name, is_folder = _base(agent, config)
    base = json.dumps(f"path/to/{name}" if is_folder else name)
    dtype = config.of_agent(agent_index(agent)).model.dtype
    return [
        f'base = AutoModelForCausalLM.from_pretrained({base}, dtype="{dtype}")',
        f"{agent} = PeftModel.from_pretrained(base, {where})",
        tokenizer,
    ]


def write_folder(folder: Path, run: Path, repository: str) -> None:
    """Fills an empty folder with what is uploaded of a run.

    Raises a UserError: the run has not ended, or one of its agents cannot be loaded.
    """
    from cory.models.load import adapter_tokenizer, attach, load_policy  # here: it imports torch

    config = run_config(run)
    agents = {path.name: path for path in run_agents(run).values()}
    for agent, saved in agents.items():
        model = config.of_agent(agent_index(agent)).model
        if _is_adapter(saved):
            base, tokenizer = load_policy(replace(model, name=config.resolve(model.name)))
            adapter_tokenizer(saved, attach(base, saved), tokenizer)
        else:
            load_policy(replace(model, name=str(saved), revision=None, quantization="none"))
    fingerprint = read_settings(run).get("fingerprint") or {}
    iterations = finished_iterations(run) or 0
    card = model_card(agents, config, fingerprint, iterations, repository)
    (folder / "README.md").write_text(card, encoding="utf-8")
    for agent, saved in agents.items():
        shutil.copytree(saved, folder / agent, ignore=shutil.ignore_patterns("README.md"))
        file = folder / agent / "adapter_config.json"
        if file.exists():  # it names the base by its path on this machine
            settings = json.loads(file.read_text(encoding="utf-8"))
            settings["base_model_name_or_path"], _ = _base(agent, config)
            file.write_text(json.dumps(settings, indent=2), encoding="utf-8")


def upload(run: Path, repository: str, public: bool) -> str:
    """Uploads a run's agents; returns their address. A repository that exists stays as private as it is.

    Raises a UserError: see `write_folder`, or the Hub cannot be reached or refuses.
    """
    api = HfApi()
    with tempfile.TemporaryDirectory() as temporary:
        write_folder(Path(temporary), run, repository)
        try:
            api.create_repo(repository, private=not public, exist_ok=True)
            api.upload_folder(
                repo_id=repository,
                folder_path=temporary,
                commit_message=f"Upload {run.name}",
                delete_patterns="agent_*/*",  # of earlier uploads
            )
        # As of the HTTP library underneath, which differs between versions.
        except Exception as error:
            raise UserError(
                f"repository: {repository!r} on {api.endpoint} cannot be written ({one_line(str(error))})"
            ) from None
    return f"{api.endpoint}/{repository}"


def run() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("run", help="folder of a run that has ended")
    parser.add_argument("repository", help="user/name; it is made where it is missing")
    parser.add_argument("--public", action="store_true", help="let everybody read it")
    parser.add_argument("--look", action="store_true", help="only write what would be uploaded")
    arguments = parser.parse_args()
    repository = arguments.repository
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repository):
        raise UserError(f"repository: expected user/name, got {repository!r}")
    folder = named(Path(arguments.run))
    if arguments.look:
        look = tempfile.mkdtemp(prefix=f"{folder.name}-")
        write_folder(Path(look), folder, repository)
        print(f"What would be uploaded to {repository} is in {look}")
    else:
        print(f"Uploaded to {upload(folder, repository, arguments.public)}")


if __name__ == "__main__":
    main(run)
