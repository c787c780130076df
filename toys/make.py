"""The command line of an example's make.py."""

from collections.abc import Callable
from pathlib import Path

from cory.command import Arguments
from cory.run.folder import filled


def make_into(default: Path, make: Callable[[Path], None], description: str | None) -> None:
    """Calls `make` to fill the folder that the command line names, replacing files of the same names.

    Args:
        default: the folder if the command line names none.
        make: called with a temporary folder to fill.
        description: the text of `--help`.
    """
    parser = Arguments(description)
    parser.add_argument("folder", nargs="?", default=str(default), help="Folder to fill")
    with filled(Path(parser.parse_args().folder)) as complete:
        make(complete)
