"""Writes report.html: of runs and evaluations, with an evaluation's tables also as Markdown, and a figure.

    python -m study.report runs/imdb_cory_tiny                            # one run: report.html in its folder
    python -m study.report runs/imdb_* --out report.html                  # several runs and evaluations in one file
    python -m study.report runs/evaluation-imdb_cory_tiny                 # evaluation.md, its figure and report.html

A run need not have ended. `study.compare` compares runs. docs/quick_start.md shows the page.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from cory.command import Arguments, main
from cory.evaluation.command import read_responses
from cory.run.folder import write_text
from cory.run.report import NAME, Page, evaluation_page, render, run_page
from cory.run.tables import interval_rows, query_label
from study.cells import markdown_table
from study.intervals import over_seeds

DIFFERENCES = 5  # queries shown for each model that differs from the base
OVER_SEEDS = "Mean ± half-width of the 95 % interval over seeds; a model without seeds has its own, as below."
OVER_QUERIES = "Mean ± half-width of the 95 % interval over queries."
Row = Mapping[str, Any]


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


def write_report(folder: Path) -> None:
    """Writes evaluation.md, report.html, and evaluation.png or pass_at_k.png, into the folder of an evaluation."""
    from cory.run.plots import svg  # here, as importing matplotlib takes a while
    from study.plots import evaluation_colours, plot_bars, plot_pass_at_k

    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    responses = read_responses(folder)
    rows = evaluation["rows"]
    titles = evaluation["titles"]
    queries = [
        query_label(query, columns)
        for query, columns in zip(evaluation["queries"], evaluation["columns"], strict=True)
    ]
    records = {
        row["name"]: [responses[row["name"], i] for i in range(len(queries))] for row in rows
    }
    shown = evaluation["settings"]["shown"]
    costs = evaluation.get("costs", {})
    text = evaluation_markdown(rows, titles, costs, queries, records, shown)
    write_text(folder / "evaluation.md", f"{evaluation['said']}.\n\n{text}")

    grouped = rows_over_seeds(rows)
    drawn = grouped or rows
    over = "seeds, of a model without seeds over queries" if grouped else "queries"
    row_colours = evaluation_colours([row["name"] for row in drawn])
    # There is no pass@k of rewards other than 0 and 1.
    ks = [k for k in evaluation["settings"]["ks"] if all(f"pass@{k}" in row for row in drawn)]
    if ks:
        name, draw = "pass_at_k.png", partial(plot_pass_at_k, drawn, ks)
    else:
        name, draw = "evaluation.png", partial(plot_bars, drawn, titles)
    draw = partial(draw, row_colours=row_colours, over=over)
    draw(folder / name)
    page = evaluation_page(folder)
    page.figures.append(svg(draw))
    write_text(folder / NAME, render(page))
    print(f"\nTables, texts and figure are in {folder}; {NAME} shows them")


def rows_over_seeds(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of models that differ in their run's seed alone (RUN-seed0/agent_1, RUN-seed1/agent_1, ...) as one row.

    Args:
        rows: each with `name`, and for every metric its value and `METRIC_ci`, the half-width of its interval.

    Returns:
        rows of the same form; where several seeds are in one, its values are means over them, and `METRIC_ci` the
        half-widths by Student's t; a model with one seed keeps its own interval. Empty if none has several.
    """
    frame = pd.DataFrame([dict(row) for row in rows])
    metrics = [column.removesuffix("_ci") for column in frame.columns if column.endswith("_ci")]
    without_interval = frame.columns.intersection(["calls"])  # the same for all seeds
    groups = frame.groupby(
        frame["name"].str.replace(r"-seed\d+(?=/|$)", "", regex=True), sort=False
    )
    if len(groups) == len(rows):
        return []
    result = []
    for name, runs in groups:
        seeds = len(runs)
        row: dict[str, Any] = {"name": f"{name}, {seeds} seeds" if seeds > 1 else name}
        row |= runs.iloc[0][without_interval].to_dict()
        for metric in (metric for metric in metrics if runs[metric].notna().all()):
            interval = over_seeds(runs[metric])
            half_width = runs[f"{metric}_ci"].iloc[0]  # over queries: none over a single one
            if seeds > 1:
                half_width = interval.high - interval.value
            row[metric] = interval.value
            row[f"{metric}_ci"] = None if pd.isna(half_width) else float(half_width)
        result.append(row)
    return result


def evaluation_markdown(
    rows: Sequence[Row],
    titles: Mapping[str, str],
    costs: Mapping[str, str],
    queries: Sequence[str],
    records: Mapping[str, Sequence[Row]],
    shown: int,
) -> str:
    """The tables of metrics, over seeds where there are several, of sample texts, and of what differs from the base.

    Args:
        titles: of the metrics. costs: of what a query costs, in a table of its own; empty without chains.
        records: by model, for each query its `completions`, and `greedy` with `greedy_reward` where there is one.
        shown: queries whose first responses are in the table.
    """
    grouped = rows_over_seeds(rows)
    parts = [OVER_SEEDS, "", markdown_table(interval_rows(grouped, titles))] if grouped else []
    if grouped and costs:
        parts += [markdown_table(interval_rows(grouped, costs))]
    samples = [
        {
            "query": query,
            **{name: answers[i]["completions"][0] for name, answers in records.items()},
        }
        for i, query in enumerate(queries[:shown])
    ]
    parts += [OVER_QUERIES, "", markdown_table(interval_rows(rows, titles))]
    if costs:
        parts += ["Cost of a query:", "", markdown_table(interval_rows(rows, costs))]
    parts.append(markdown_table(samples))
    if "base" in records and all("greedy" in answers[0] for answers in records.values()):
        parts += [
            "## Where models differ from the base",
            "",
            markdown_table(differences(records, queries)),
        ]
    return "\n".join(parts)


def differences(
    records: Mapping[str, Sequence[Row]], queries: Sequence[str]
) -> list[dict[str, str]]:
    """Queries whose greedy answer earns more than the base's, and less, with both texts."""
    rows = []
    for name, answers in records.items():
        pairs = list(zip(records["base"], answers, strict=True))
        for sign, outcome in ((1, "better than the base"), (-1, "worse than the base")):
            differ = [
                (a, b) for a, b in pairs if sign * (b["greedy_reward"] - a["greedy_reward"]) > 0
            ]
            for a, b in differ[:DIFFERENCES]:
                texts = {
                    "query": queries[a["query"]],
                    "its answer": b["greedy"],
                    "base's answer": a["greedy"],
                }
                rows.append({"model": name, "": outcome, **texts})
    return rows


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.report`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("folders", nargs="+", help="Folders of runs and evaluations")
    parser.add_argument(
        "--out", help="The file. Default: in a single folder, else runs/report.html"
    )
    args = parser.parse_args(argv)
    # Beside an experiment's runs lie their logs, which a pattern names, too.
    folders = [Path(name) for name in args.folders if not Path(name).is_file()]
    if len(folders) == 1 and args.out is None and (folders[0] / "evaluation.json").is_file():
        write_report(folders[0])
        return
    out = Path(args.out or (folders[0] if len(folders) == 1 else Path("runs")) / NAME)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, render(make_page(folders)))
    print(f"Written to {out}")


if __name__ == "__main__":
    main(command_line)
