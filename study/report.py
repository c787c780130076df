"""Gathers runs and evaluations in one report.html, or writes that of a single one anew.

    python -m study.report runs/imdb_cory_tiny                            # one run: report.html in its folder
    python -m study.report runs/imdb_* --out report.html                  # several runs and evaluations in one file

A run need not have ended. `study.compare` compares runs. docs/quick_start.md shows the page.
"""

from collections.abc import Sequence
from pathlib import Path

from cory.command import Arguments, main
from cory.errors import UserError
from cory.evaluation.report import evaluation_page
from cory.run.folder import write_text
from cory.run.report import NAME, Page, render, run_page


def make_page(folders: Sequence[Path]) -> Page:
    """The page of runs and evaluations, one after the other; the completions of a query stand side by side."""
    page = Page(folders[0].name if len(folders) == 1 else "Report")
    for folder in folders:
        is_evaluation = (folder / "evaluation.json").is_file()
        part = evaluation_page(folder) if is_evaluation else run_page(folder, folder.name)
        page.facts += part.facts
        page.notes += [f"{folder.name}: {note}" for note in part.notes]
        page.figures += part.figures
        page.tables += [
            table._replace(title=f"{folder.name}: {table.title}") for table in part.tables
        ]
        for chains in part.completions.values():
            for title, chain in chains:
                page.add_chain(title, chain)
    return page


def named_folders(names: Sequence[str]) -> list[Path]:
    """The folders that a command names, without the logs beside an experiment's runs, which a pattern names, too.

    Raises:
        UserError: there is none.
    """
    folders = [Path(name) for name in names if not Path(name).is_file()]
    if not folders:
        raise UserError(f"expected folders of runs, got files alone: {' '.join(names)}")
    return folders


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.report`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("folders", nargs="+", help="Folders of runs and evaluations")
    parser.add_argument(
        "--out", help="The file. Default: in a single folder, else runs/report.html"
    )
    args = parser.parse_args(argv)
    folders = named_folders(args.folders)
    out = Path(args.out or (folders[0] if len(folders) == 1 else Path("runs")) / NAME)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, render(make_page(folders)))
    print(f"Written to {out}")


if __name__ == "__main__":
    main(command_line)
