"""Uploads the agents of a run to the Hugging Face Hub, with tokenizers and a model card: docs/share.md.

    python -m cory.push runs/imdb_cory_tiny user/name                       # private; again: only what has changed
    python -m cory.push runs/imdb_cory_tiny user/name --public              # for everybody
    python -m cory.push runs/imdb_cory_tiny user/name --look FOLDER         # writes it to a folder instead

Needs a token: `hf auth login`, or HF_TOKEN. Held-out results are those of the run's newest evaluation beside it.
"""

import shutil
from pathlib import Path

from cory.cli.arguments import Arguments
from cory.cli.main import main
from cory.config import HubConfig
from cory.run.output import filled
from cory.tasks.kind import run_config


def run() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("run", type=str, help="folder of a run that has ended")
    parser.add_argument("repository", type=str, help="user/name; it is made where it is missing")
    parser.add_argument("--public", action="store_true", help="let everybody read it")
    parser.add_argument("--base", type=str | None, help="Hub id of the base, where the run used a local folder")
    parser.add_argument("--evaluation", type=Path | None, help="folder of an evaluation of the run")
    parser.add_argument("--look", type=Path | None, help="write what would be uploaded to this new folder instead")
    given = parser.of()
    folder, hub = Path(given.run), HubConfig(given.repository, given.public, given.base)
    if given.look is None:
        hub.check_token()
    from cory.push.upload import contents, push

    config = run_config(folder)
    if given.look is None:
        print(push(folder, config, hub, given.evaluation))
        return
    with filled(given.look) as complete:
        for name, content in contents(folder, config, hub, given.evaluation).items():
            (complete / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                (complete / name).write_bytes(content)
            else:
                shutil.copy(content, complete / name)
    print(f"What would be uploaded to {hub.push} is in {given.look}")


if __name__ == "__main__":
    main(run)
