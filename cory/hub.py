"""Shares the agents of a run on the Hugging Face Hub, with a model card: docs/share.md.

    python -m cory.hub runs/imdb_cory_tiny user/name               # private
    python -m cory.hub runs/imdb_cory_tiny user/name --public      # for everybody
    python -m cory.hub runs/imdb_cory_tiny user/name --look        # writes what would be uploaded, and uploads nothing

Needs a token: `hf auth login`, or HF_TOKEN. The card has the table of the newest evaluation beside the run that has
evaluated its agents as they are now.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token

from cory.cli.arguments import Arguments
from cory.cli.main import main
from cory.config import Config
from cory.errors import UserError
from cory.evaluation.agents import run_agents
from cory.evaluation.folder import trained
from cory.identity import is_local
from cory.plural import counted
from cory.prompts import RolePrompts
from cory.report.escape import markdown, printable
from cory.report.tables import interval_cell, markdown_table
from cory.run.folder import finished_iterations
from cory.run.settings import named, read_settings, yaml_text
from cory.tasks.kind import run_config

PAPER = "https://arxiv.org/abs/2410.06101"
# What is uploaded of an agent's folder: weights, configurations, tokenizer, chat template.
AGENT_FILES = (".safetensors", ".json", ".txt", ".model", ".jinja")
# Those of them that may name folders of this machine.
CONFIGURATIONS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer_config.json",
)


def model_card(
    agents: Mapping[str, Path],
    config: Config,
    fingerprint: Mapping[str, Any],
    iterations: int,
    repository: str | None = None,
    held_out: str = "",
) -> str:
    """A README.md for saved agents. It names no path of this machine; texts in it act neither as Markdown nor as HTML.

    Args:
        agents: their folders, by name.
        config: the run's settings.
        fingerprint: of the run's config.yaml.
        iterations: that were done.
        repository: user/name, whose subfolders the agents are. None: the card is for the folder of a single agent.
        held_out: held-out results, as Markdown.
    """
    bases = {agent: _base(agent, config, fingerprint) for agent in agents}
    on_hub = list(dict.fromkeys(base for base, is_folder in bases.values() if not is_folder))
    header = ModelCardData(
        base_model=on_hub[0] if len(on_hub) == 1 else on_hub or None,
        library_name="peft" if any(map(_is_adapter, agents.values())) else "transformers",
        pipeline_tag="text-generation",
        tags=["cory", config.algorithm, "reinforcement-learning"],
    )

    origins = []
    for agent, (base, is_folder) in bases.items():
        where = " (a local folder, not on the Hub)" if is_folder else ""
        how = "trained from" if config.is_trained(_index(agent)) else "not trained, a copy of"
        origins.append(f"* {agent}: {how} {markdown(base)}{where}")

    method = f"{config.method()} ([paper]({PAPER})), {counted(iterations, 'iteration')}"
    if config.cory.num_roles > 1:
        method += f", credit {config.cory.credit}, weight {config.cory.weight:g}"

    rewards = [fingerprint[key] for key in ("reward", "team_reward") if fingerprint.get(key)]
    task = f"{fingerprint.get('rows')} queries"
    dataset = getattr(getattr(config, "task", None), "dataset", None)
    if dataset:
        task += f" of {markdown(_last_part(dataset))}"
    task += f", reward {markdown(' and '.join(rewards))}"

    prompts = RolePrompts(**fingerprint.get("prompts") or {}, roles=tuple(config.roles))
    templates = {}
    for role in range(config.cory.num_roles):
        read = role if config.cory.knowledge_transfer else 0
        templates[prompts.name(role)] = prompts.template(read)

    parts = [
        f"# {markdown(repository or next(iter(agents)))}",
        "\n".join(origins),
        f"Method: {method}.",
        f"Task: {task}.",
        "## Load",
        _fenced(_code(agents, bases, config, repository), "python"),
        "## Prompts of the roles",
        _fenced(printable(yaml_text(templates)), "yaml"),
    ]
    if held_out:
        parts += ["## Held-out results", held_out]
    text = "\n\n".join(parts)
    return str(ModelCard(f"---\n{header.to_yaml()}\n---\n\n{text}\n"))


def _index(agent: str) -> int:
    return int(agent.removeprefix("agent_")) - 1


def _base(agent: str, config: Config, fingerprint: Mapping[str, Any]) -> tuple[str, bool]:
    """The model that an agent started from: a Hub id, or the name of a local folder; and whether it is the latter."""
    index = _index(agent)
    name = config.of_agent(index).model.name
    key = f"agents[{index}].model.name" if config.agents else "model.name"
    recorded = (fingerprint.get("models") or {}).get(key) or {}
    is_hashed = (recorded.get("identity") or "").startswith("sha256:")  # as folders are
    if is_hashed or config.resolve(name) != name or is_local(name):
        return _last_part(name), True
    return name, False


def _is_adapter(agent: Path) -> bool:
    return (agent / "adapter_config.json").exists()


def _last_part(path: str) -> str:
    """The name of a file or folder, by a path of any system."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def _code(
    agents: Mapping[str, Path],
    bases: Mapping[str, tuple[str, bool]],
    config: Config,
    repository: str | None,
) -> str:
    """Python code that loads the agents."""
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    if any(map(_is_adapter, agents.values())):
        lines.insert(0, "from peft import PeftModel")
    for agent, folder in agents.items():
        where = f'"{repository}", subfolder="{agent}"' if repository else f'"path/to/{agent}"'
        if _is_adapter(folder):
            name, is_folder = bases[agent]
            base = json.dumps(f"path/to/{name}" if is_folder else name)
            dtype = config.of_agent(_index(agent)).model.dtype
            lines += [
                f'base = AutoModelForCausalLM.from_pretrained({base}, dtype="{dtype}")',
                f"{agent} = PeftModel.from_pretrained(base, {where})",
            ]
        else:
            lines.append(f"{agent} = AutoModelForCausalLM.from_pretrained({where})")
        tokenizer = agent.replace("agent", "tokenizer")
        lines.append(f"{tokenizer} = AutoTokenizer.from_pretrained({where})")
    return "\n".join(lines)


def _fenced(text: str, language: str) -> str:
    """The text as a code block, in a fence that is longer than any in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def held_out_results(run: Path) -> str:
    """The table of the newest evaluation beside a run that has evaluated its agents as they are now; empty without one.

    It has the rows of the bases, of the run's agents, and of their chains among themselves.
    """
    end_of_run = trained([str(run)])[str(run)]
    files = sorted(run.parent.glob("*/evaluation.json"), key=lambda file: -file.stat().st_mtime)
    for file in files:
        settings = json.loads((file.parent / "settings.json").read_text(encoding="utf-8"))
        evaluation = json.loads(file.read_text(encoding="utf-8"))
        for model, end in settings["trained"].items():
            if end == end_of_run:
                rows = _rows_of_run(evaluation["rows"], Path(model).name)
                table = markdown_table(["", *evaluation["titles"].values()], [
                    [name, *(interval_cell(row, metric) for metric in evaluation["titles"])]
                    for name, row in rows.items()
                ])  # fmt: skip
                return f"{markdown(evaluation['said'])}; mean ± half-width of the 95 % interval.\n\n{table}"
    return ""


def _rows_of_run(rows: Sequence[Mapping[str, Any]], run: str) -> dict[str, Mapping[str, Any]]:
    """The rows by their names, without those of other runs and without the run's own name."""
    of_run = re.compile(r"base( after itself)*|(base of )?agent_\d+( after (agent_\d+|itself))*")
    by_name = {row["name"].replace(f"{run}/", ""): row for row in rows}
    return {name: row for name, row in by_name.items() if of_run.fullmatch(name)}


def write_folder(folder: Path, run: Path, repository: str) -> None:
    """Fills an empty folder with what is uploaded of a run. Raises a UserError if the run has not ended."""
    config = run_config(run)
    agents = {path.name: path for path in run_agents(run).values()}
    fingerprint = read_settings(run).get("fingerprint") or {}
    iterations = finished_iterations(run) or 0
    held_out = held_out_results(run)
    card = model_card(agents, config, fingerprint, iterations, repository, held_out)
    (folder / "README.md").write_text(card, encoding="utf-8")
    for agent, saved in agents.items():
        (folder / agent).mkdir()
        base, _ = _base(agent, config, fingerprint)
        for file in saved.iterdir():
            if file.suffix in AGENT_FILES:
                shutil.copy(file, folder / agent)
        for name in CONFIGURATIONS:
            file = folder / agent / name
            if file.exists():
                content = _without_paths(json.loads(file.read_text(encoding="utf-8")), base)
                file.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _without_paths(settings: Mapping[str, Any], base: str) -> dict[str, Any]:
    """A model's settings with `base` as an adapter's base, and with the last part alone of each absolute path."""
    result = dict(settings)
    for key, value in settings.items():
        if key == "base_model_name_or_path":
            result[key] = base
        elif isinstance(value, str) and re.search("path|file|dir|name", key):
            is_absolute = value.startswith(("/", "~")) or PureWindowsPath(value).is_absolute()
            result[key] = _last_part(value) if is_absolute else value
    return result


def upload(run: Path, repository: str, public: bool) -> str:
    """Uploads a run's agents; returns their address.

    Raises a UserError: the run has not ended, there is no token, there is a public repository of that name and
    `public` is false, or the other way round, or the Hub refuses or cannot be reached.
    """
    if get_token() is None:
        raise UserError("expected a token of the Hub, got none: run `hf auth login`")
    api = HfApi()
    with tempfile.TemporaryDirectory() as temporary:
        write_folder(Path(temporary), run, repository)
        try:
            api.create_repo(repository, private=not public, exist_ok=True)
            is_public = not api.repo_info(repository).private
            if is_public == public:
                api.upload_folder(
                    repo_id=repository,
                    folder_path=temporary,
                    commit_message=f"Upload {run.name}",
                    delete_patterns="agent_*/*",  # of earlier uploads
                )
        except Exception as error:  # of the HTTP library, whose errors differ between versions
            raise UserError(f"{repository}: the upload failed, repeat it: {error}") from None
    if is_public != public:
        raise UserError(
            f"{repository}: expected --public for a public repository, and only for one, as this is "
            f"{'public' if is_public else 'private'}, got {'' if public else 'no '}--public"
        )
    return f"{api.endpoint}/{repository}"


def run() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("run", type=str, help="folder of a run that has ended")
    parser.add_argument("repository", type=str, help="user/name; it is made where it is missing")
    parser.add_argument("--public", action="store_true", help="let everybody read it")
    parser.add_argument("--look", action="store_true", help="only write what would be uploaded")
    arguments = parser.of()
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
