"""Writes reports: of runs and evaluations one HTML file, of an evaluation also tables as Markdown and a figure.

    python -m study.report runs/imdb_cory_tiny                            # one run: report.html in its folder
    python -m study.report 'runs/imdb_*' --out report.html                # several runs and evaluations in one file
    python -m study.report runs/evaluation-imdb_cory_tiny                 # evaluation.md, its figure and report.html

Runs whose settings differ in their seed alone form a group. A run need not have ended. docs/report.md shows the page.
"""

import glob
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cory.cli.arguments import Arguments
from cory.cli.main import main
from cory.errors import UserError
from cory.evaluation.folder import read_responses
from cory.report import NAME
from cory.report.page import write_page
from cory.run.folder import write_text
from study.evaluated import evaluation_markdown, rows_over_seeds
from study.groups import find
from study.page import make_page
from study.records import read


def write_report(folder: Path) -> None:
    """Writes evaluation.md, report.html, and evaluation.png or pass_at_k.png, into the folder of an evaluation.

    Raises:
        UserError: the folder holds no evaluation that has ended.
    """
    try:
        evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        responses = read_responses(folder)
        rows = evaluation["rows"]
        titles = evaluation["titles"]
        costs = evaluation.get("costs", {})
        queries = evaluation["queries"]
        records = {
            row["name"]: [responses[row["name"], i] for i in range(len(queries))] for row in rows
        }
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"expected the folder of an evaluation that has ended, got {str(folder)!r} ({error})"
        ) from None
    text = evaluation_markdown(
        rows, titles, costs, queries, records, evaluation["settings"]["shown"]
    )
    write_text(folder / "evaluation.md", f"{evaluation['said']}.\n\n{text}")

    # Here, as importing matplotlib takes a while.
    from cory.report.plots import svg
    from study.plots import plot_bars, plot_pass_at_k

    shown = rows_over_seeds(rows) or rows
    # There is no pass@k of rewards other than 0 and 1.
    ks = [k for k in evaluation["settings"]["ks"] if all(f"pass@{k}" in row for row in shown)]
    if ks:
        name, draw = "pass_at_k.png", partial(plot_pass_at_k, shown, ks)
    else:
        name, draw = "evaluation.png", partial(plot_bars, shown, titles)
    draw(folder / name)
    page = make_page([], [folder], folder.name)
    page.figures.append(svg(draw))
    write_page(folder / NAME, page)
    print(f"\nTables, texts and figure are in {folder}; {NAME} shows them")


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.report`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "folders", nargs="+", help="Folders of runs and evaluations, or globs that match some"
    )
    parser.add_argument(
        "--out", type=str | None, help="The file. null: in a single folder, else runs/report.html"
    )
    parser.add_argument(
        "--title", type=str, default="Report", help="Of a report on several folders"
    )
    parser.add_argument("--baseline", type=str | None, help="As in study.compare")
    parser.add_argument("--over", type=str | None, help="As in study.compare")
    args = parser.of(argv)
    evaluations, patterns = split(args.folders)
    runs = [read(path) for path in find(patterns)] if patterns else []
    if len(evaluations) == 1 and not runs and args.out is None:
        write_report(evaluations[0])
        return
    folder = runs[0].folder if len(runs) == 1 and not evaluations else Path("runs")
    out = Path(args.out) if args.out else folder / NAME
    try:
        page = make_page(runs, evaluations, args.title, args.baseline, args.over)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"expected runs and evaluations that can be read, got {args.folders} ({type(error).__name__}: {error})"
        ) from None
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, page)
    print(f"Written to {out}")


def split(patterns: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The folders of evaluations among paths and globs, and the patterns that match anything else or nothing."""
    evaluations: dict[Path, None] = {}
    others = []
    for pattern in patterns:
        paths = (
            [Path(pattern)]
            if Path(pattern).is_dir()
            else [Path(name) for name in sorted(glob.glob(pattern))]
        )
        matching = [path for path in paths if _is_evaluation(path)]
        evaluations |= dict.fromkeys(matching)
        if not matching or any((path / "config.yaml").is_file() for path in paths):
            others.append(pattern)
    return list(evaluations), others


def _is_evaluation(folder: Path) -> bool:
    return (folder / "evaluation.json").is_file() or (folder / "responses.jsonl").is_file()


if __name__ == "__main__":
    main(command_line)
