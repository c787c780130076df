"""The command of an example's make.py: into which folder its data and models go."""

from collections.abc import Callable, Sequence
from pathlib import Path

from cory.command import Arguments
from cory.run.output import check_results_folder, staged


def make_into(
    default: Path,
    name: str,
    files: Sequence[str],
    make: Callable[[Path], None],
    description: str | None,
) -> None:
    """Lets `make` fill the folder that the command line names, or `default`.

    A folder that the same script has filled before is filled anew; the file made_by_NAME.txt tells it.

    Args:
        name: of the script. files: what it makes. description: what `--help` shows.

    Raises:
        UserError: the folder has files of these names that the script has not made.
    """
    parser = Arguments(description)
    parser.add_argument("folder", nargs="?", default=str(default), help="To be filled")
    folder = Path(parser.parse_args().folder)
    mark = f"made_by_{name}.txt"
    check_results_folder(folder, (mark, *files))
    folder.mkdir(parents=True, exist_ok=True)
    with staged(folder) as complete:
        make(complete)
        (complete / mark).write_text(f"{', '.join(files)}\n")
