"""The command of an example's make.py: into which folder its data and models go."""

from collections.abc import Callable
from pathlib import Path

from cory.command import Arguments
from cory.run.folder import filled


def make_into(default: Path, make: Callable[[Path], None], description: str | None) -> None:
    """Lets `make` fill the folder that the command line names, or `default`; what it makes replaces files of the same
    names. `description`: what `--help` shows.
    """
    parser = Arguments(description)
    parser.add_argument("folder", nargs="?", default=str(default), help="To be filled")
    with filled(Path(parser.parse_args().folder)) as complete:
        make(complete)
