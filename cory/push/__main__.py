"""Uploads the agents of a run to the Hugging Face Hub, with tokenizers and a model card: docs/share.md.

    python -m cory.push runs/imdb_cory_tiny user/name                       # private; again: only what has changed
    python -m cory.push runs/imdb_cory_tiny user/name --public              # for everybody
    python -m cory.push runs/imdb_cory_tiny user/name --look FOLDER         # writes it to a folder instead

Needs a token: `hf auth login`, or HF_TOKEN. Held-out results are those of the run's newest evaluation beside it.
"""

from pathlib import Path

from cory.cli.arguments import Arguments
from cory.cli.main import main
from cory.config import HubConfig
from cory.run.output import filled
from cory.run.record import named
from cory.tasks.kind import run_config


def run() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("run", type=str, help="folder of a run that has ended")
    parser.add_argument("repository", type=str, help="user/name; it is made where it is missing")
    parser.add_argument("--public", action="store_true", help="let everybody read it")
    parser.add_argument(
        "--base",
        type=str | None,
        help="Hub id of the base, where the run used a local folder; default: the run's hub.base",
    )
    parser.add_argument("--evaluation", type=Path | None, help="folder of an evaluation of the run")
    parser.add_argument(
        "--look", type=Path | None, help="write what would be uploaded to this new folder instead"
    )
    arguments = parser.of()
    folder = named(Path(arguments.run))
    config = run_config(folder)
    base = arguments.base or config.hub.base
    hub = HubConfig(arguments.repository, arguments.public, base)
    if arguments.look is None:
        hub.check_token()

    if arguments.look is None:
        from cory.push.upload import push

        print(push(folder, config, hub, arguments.evaluation))
        return
    from cory.push.stage import stage

    with filled(arguments.look) as complete:
        stage(complete, folder, config, hub, arguments.evaluation)
    print(f"What would be uploaded to {hub.push} is in {arguments.look}")


if __name__ == "__main__":
    main(run)
