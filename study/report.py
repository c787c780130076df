"""Writes report.html: of a run, of an evaluation (also as Markdown, with a figure), or of several together.

    python -m study.report runs/imdb_cory_tiny                            # one run: report.html in its folder
    python -m study.report 'runs/imdb_*' --out report.html                # several runs and evaluations in one file
    python -m study.report runs/evaluation-imdb_cory_tiny                 # evaluation.md, its figure and report.html

Runs whose settings differ in their seed alone form a group. A single run need not have ended. docs/report.md shows the
page.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cory.command import Arguments, main
from cory.evaluation.command import read_responses
from cory.plural import counted
from cory.run.folder import write_text
from cory.run.report import NAME, Page, Table, render, run_page, write_or_warn
from cory.run.tables import interval_rows
from study import comparison, held_out
from study.caveats import caveats
from study.cells import TITLES
from study.evaluated import OVER_SEEDS, evaluation_markdown, rows_over_seeds
from study.frame import Study, of_records
from study.groups import find, method
from study.records import read


def write_comparison_page(study: Study, path: Path, title: str, question: str = "") -> None:
    """Writes the page of a comparison. Warns if that fails, as its other files are written already."""
    write_or_warn(path, partial(make_page, study, [], title, question))


def make_page(
    study: Study | None, evaluations: Sequence[Path], title: str, question: str = ""
) -> Page:
    """The page of runs with their comparison, and of evaluations. Completions are those of each group's first run."""
    page = Page(title, facts=[question] if question else [])
    if study:
        add_comparison(page, study)
    for folder in evaluations:
        evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        if over_seeds := rows_over_seeds(evaluation["rows"]):
            rows = interval_rows(over_seeds, evaluation["titles"])
            page.tables.append(Table("Held-out evaluation, over seeds", rows, OVER_SEEDS))
        page.add_evaluation(folder)
    return page


def add_comparison(page: Page, study: Study) -> None:
    """Adds caveats, figures, tables and completions of a comparison."""
    from cory.run.plots import svg  # here, as importing matplotlib takes a while
    from study import plots

    page.notes += caveats(study)
    if len(study.metrics):
        page.figures.append(svg(partial(plots.plot_curves, study)))
    if len(study.held_out):
        page.figures.append(svg(partial(plots.plot_held_out, study)))
        metric = held_out.judged_by(study)
        rows = held_out.held_out(study, metric)
        title = f"Held out: {TITLES.get(metric, metric)}"
        page.tables.append(Table(title, rows, held_out.NOTE.replace("*", "")))
    note = f"{comparison.training_note(study)} {comparison.what_is_compared(study)}"
    page.tables.append(Table("End of training", comparison.ends(study), note))
    if settings := comparison.settings(study):
        page.tables.append(Table("Settings that differ between groups", settings))

    for name, runs in study.runs.groupby("group", sort=False):
        ended = (runs["problems"] == "").sum()
        page.facts.append(f"{name}: {ended} of {counted(len(runs), 'run')} ended")
        first = runs["run"].iloc[0]
        for record in study.records:
            if record.folder.name == first:
                page.add_samples(str(name), record.folder, record.samples)


def write_report(folder: Path) -> None:
    """Writes evaluation.md, report.html, and evaluation.png or pass_at_k.png, into the folder of an evaluation."""
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    responses = read_responses(folder)
    rows = evaluation["rows"]
    titles = evaluation["titles"]
    queries = evaluation["queries"]
    records = {
        row["name"]: [responses[row["name"], i] for i in range(len(queries))] for row in rows
    }
    text = evaluation_markdown(
        rows,
        titles,
        evaluation.get("costs", {}),
        queries,
        records,
        evaluation["settings"]["shown"],
    )
    write_text(folder / "evaluation.md", f"{evaluation['said']}.\n\n{text}")

    from cory.run.plots import svg
    from study.plots import plot_bars, plot_pass_at_k

    shown = rows_over_seeds(rows) or rows
    # There is no pass@k of rewards other than 0 and 1.
    ks = [k for k in evaluation["settings"]["ks"] if all(f"pass@{k}" in row for row in shown)]
    if ks:
        name, draw = "pass_at_k.png", partial(plot_pass_at_k, shown, ks)
    else:
        name, draw = "evaluation.png", partial(plot_bars, shown, titles)
    draw(folder / name)
    page = make_page(None, [folder], folder.name)
    page.figures.append(svg(draw))
    write_text(folder / NAME, render(page))
    print(f"\nTables, texts and figure are in {folder}; {NAME} shows them")


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.report`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "folders", nargs="+", help="Folders of runs, or globs that match some; of evaluations"
    )
    parser.add_argument(
        "--out", help="The file. Default: in a single folder, else runs/report.html"
    )
    args = parser.parse_args(argv)
    evaluations = [Path(name) for name in args.folders if Path(name, "evaluation.json").is_file()]
    patterns = [name for name in args.folders if Path(name) not in evaluations]
    if evaluations and len(args.folders) == 1 and args.out is None:
        write_report(evaluations[0])
        return
    runs = [read(path) for path in find(patterns)]
    is_single = len(runs) == 1 and not evaluations
    out = Path(args.out) if args.out else (runs[0].folder if is_single else Path("runs")) / NAME
    if is_single:
        page = run_page(runs[0].folder, method(runs[0].settings), runs[0].problems)
    else:
        page = make_page(of_records(runs) if runs else None, evaluations, "Report")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, render(page))
    print(f"Written to {out}")


if __name__ == "__main__":
    main(command_line)
