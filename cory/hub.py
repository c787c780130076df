"""Shares a run's agents on the Hugging Face Hub, with a model card (docs/quick_start.md).

    python -m cory.hub runs/imdb_cory_tiny user/name               # private
    python -m cory.hub runs/imdb_cory_tiny user/name --public      # public
    python -m cory.hub runs/imdb_cory_tiny user/name --look        # only writes the files locally

Needs a token: `hf auth login`, or HF_TOKEN.
"""

import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi

from cory.command import Arguments, main
from cory.errors import UserError
from cory.identity import is_adapter
from cory.run.card import base_of, model_card
from cory.run.folder import agent_index, finished_iterations, run_agents
from cory.run.settings import named, read_settings
from cory.run.tables import one_line
from cory.task_kinds import run_config


def write_folder(folder: Path, run: Path, repository: str) -> None:
    """Writes a run's agents and a model card into an empty folder.

    Raises a UserError if the run has not ended, an agent cannot be loaded, or its folder has a link.
    """
    # Imported late, as it imports torch.
    from cory.models.load import adapter_tokenizer, attach, load_policy

    config = run_config(run)
    agents = {path.name: path for path in run_agents(run).values()}
    for agent, saved in agents.items():
        model = config.of_agent(agent_index(agent)).model
        if is_adapter(saved):
            base, tokenizer = load_policy(replace(model, name=config.resolve(model.name)))
            adapter_tokenizer(saved, attach(base, saved), tokenizer)
        else:
            load_policy(replace(model, name=str(saved), revision=None, quantization="none"))
    fingerprint = read_settings(run).get("fingerprint") or {}
    iterations = finished_iterations(run) or 0
    card = model_card(agents, config, fingerprint, iterations, repository)
    (folder / "README.md").write_text(card, encoding="utf-8")
    for agent, saved in agents.items():
        for path in saved.rglob("*"):
            if path.is_symlink():
                raise UserError(
                    f"{path}: expected a file, got a link, which may lead out of the run"
                )
        shutil.copytree(saved, folder / agent, ignore=shutil.ignore_patterns("README.md"))
        file = folder / agent / "adapter_config.json"
        if file.exists():  # name the adapter's base by its public name, not its local path
            settings = json.loads(file.read_text(encoding="utf-8"))
            settings["base_model_name_or_path"], _ = base_of(agent, config)
            file.write_text(json.dumps(settings, indent=2), encoding="utf-8")


def upload(run: Path, repository: str, public: bool) -> str:
    """Uploads a run's agents and returns their URL. An existing repository keeps its visibility.

    Raises a UserError like `write_folder`, and also if the Hub is unreachable or refuses the upload.
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
                delete_patterns="agent_*/*",  # files of earlier uploads
            )
        # The exception types depend on huggingface_hub's version and its HTTP library.
        except Exception as error:
            raise UserError(
                f"repository: {repository!r} on {api.endpoint} cannot be written ({one_line(str(error))})"
            ) from None
    return f"{api.endpoint}/{repository}"


def run() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("run", help="folder of a run that has ended")
    parser.add_argument("repository", help="user/name; created if it does not exist")
    parser.add_argument("--public", action="store_true", help="make the repository public")
    parser.add_argument(
        "--look", action="store_true", help="write the files locally, and upload nothing"
    )
    arguments = parser.parse_args()
    repository = arguments.repository
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repository):
        raise UserError(f"repository: expected user/name, got {repository!r}")
    folder = named(Path(arguments.run))
    if arguments.look:
        look = tempfile.mkdtemp(prefix=f"{folder.name}-")
        write_folder(Path(look), folder, repository)
        print(f"Nothing was uploaded. The files for {repository} are in {look}")
    else:
        print(f"Uploaded to {upload(folder, repository, arguments.public)}")


if __name__ == "__main__":
    main(run)
