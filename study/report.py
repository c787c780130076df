"""Writes reports: of runs and evaluations one HTML file, of an evaluation also tables as Markdown and a figure.

    python -m study.report runs/imdb_cory_tiny                            # one run: report.html in its folder
    python -m study.report 'runs/imdb_*' --out report.html                # several runs and evaluations in one file
    python -m study.report runs/evaluation-imdb_cory_tiny                 # evaluation.md, its figure and report.html

Runs whose settings differ in their seed alone form a group. A run need not have ended. docs/report.md shows the page.
"""

import glob
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cory.cli.arguments import Arguments
from cory.cli.main import main
from cory.errors import UserError
from cory.evaluation.folder import read_responses
from cory.report import NAME
from cory.report.page import MARK, write_page
from cory.run.output import check_result_file, replace_text
from study.groups import find
from study.page import make_payload
from study.records import read
from study.tables import markdown_table, over_seeds

DIFFERENCES = 5  # queries shown for each model that differs from the base
OVER_SEEDS = "Mean ± standard deviation over seeds; a model without seeds has its own interval, as below.\n\n"
OVER_QUERIES = "Mean ± half-width of the 95 % interval over queries.\n\n"


def write_report(folder: Path) -> None:
    """Writes evaluation.md, report.html, and evaluation.png or pass_at_k.png, into the folder of an evaluation.

    Raises:
        UserError: the folder holds no evaluation that has ended.
    """
    try:
        evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        done = read_responses(folder)
        rows, titles, queries = (evaluation[key] for key in ("rows", "titles", "queries"))
        of_models = {row["name"]: [done[row["name"], i] for i in range(len(queries))] for row in rows}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"expected the folder of an evaluation that has ended, got {str(folder)!r} ({error})") from None
    text = evaluation_markdown(rows, titles, queries, of_models, evaluation["settings"]["shown"])
    replace_text(folder / "evaluation.md", f"{evaluation['said']}.\n\n{text}")
    from study.evaluation_plots import plot_bars, plot_pass_at_k  # here, as importing matplotlib takes a while

    ks = evaluation["settings"]["ks"]
    if ks:
        plot_pass_at_k(over_seeds(rows) or rows, ks, folder / "pass_at_k.png")
    else:
        plot_bars(over_seeds(rows) or rows, titles, folder / "evaluation.png")
    write_page(folder / NAME, make_payload([], [folder], folder.name))
    print(f"\nTables, texts and figure are in {folder}; {NAME} shows them")


def evaluation_markdown(
    rows: Sequence[Mapping[str, Any]],
    titles: Mapping[str, str],
    queries: Sequence[str],
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    shown: int,
) -> str:
    """The tables of metrics, over seeds where there are several, of sample texts, and of what differs from the base.

    Args:
        records: by model, for each query its `completions`, and `greedy` with `greedy_reward` where there is one.
        shown: queries whose first responses are in the table.
    """

    def table(rows: Sequence[Mapping[str, Any]]) -> str:
        return markdown_table(
            [
                {"model": row["name"], **{title: f"{row[m]:.3f} ± {row[f'{m}_ci']:.3f}" for m, title in titles.items()}}
                for row in rows
            ]
        )

    groups = over_seeds(rows)
    text = f"{OVER_SEEDS}{table(groups)}\n" if groups else ""
    samples = [
        {"query": query, **{name: of[i]["completions"][0] for name, of in records.items()}}
        for i, query in enumerate(queries[:shown])
    ]
    text += f"{OVER_QUERIES}{table(rows)}\n{markdown_table(samples)}"
    if all("greedy" in of[0] for of in records.values()) and records:
        text += "\n## Where models differ from the base\n\n" + markdown_table(differences(records, queries))
    return text


def differences(records: Mapping[str, Sequence[Mapping[str, Any]]], queries: Sequence[str]) -> list[dict[str, str]]:
    """Queries whose greedy answer earns more than the base's, and less, with both texts."""
    base, rows = records["base"], []
    for name, others in records.items():
        for sign, said in ((1, "better than the base"), (-1, "worse than the base")):
            found = [
                (a, b)
                for a, b in zip(base, others, strict=True)
                if sign * (b["greedy_reward"] - a["greedy_reward"]) > 0
            ]
            for a, b in found[:DIFFERENCES]:
                texts = {"query": queries[a["query"]], "its answer": b["greedy"], "base's answer": a["greedy"]}
                rows.append({"model": name, "": said, **texts})
    return rows


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.report`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("folders", nargs="+", help="Folders of runs and evaluations, or globs that match some")
    parser.add_argument("--out", type=str | None, help="The file. null: in a single folder, else runs/report.html")
    parser.add_argument("--title", type=str, default="Report", help="Of a report on several folders")
    parser.add_argument("--baseline", type=str | None, help="As in study.compare")
    parser.add_argument("--over", type=str | None, help="As in study.compare")
    args = parser.of(argv)
    evaluations, patterns = split(args.folders)
    runs = [read(path) for path in find(patterns)] if patterns else []
    if len(evaluations) == 1 and not runs and args.out is None:
        write_report(evaluations[0])
        return
    alone = runs[0].folder if len(runs) == 1 and not evaluations else Path("runs")
    out = Path(args.out) if args.out else alone / NAME
    check_result_file(out, MARK)
    try:
        payload = make_payload(runs, evaluations, args.title, args.baseline, args.over)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"expected runs and evaluations that can be read, got {args.folders} ({type(error).__name__}: {error})"
        ) from None
    write_page(out, payload)
    print(f"Written to {out}")


def split(patterns: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The folders of evaluations among paths and globs, and the patterns that match anything else or nothing."""
    evaluations: dict[Path, None] = {}
    others = []
    for pattern in patterns:
        paths = [Path(pattern)] if Path(pattern).is_dir() else [Path(name) for name in sorted(glob.glob(pattern))]
        found = [path for path in paths if (path / "evaluation.json").is_file() or (path / "responses.jsonl").is_file()]
        evaluations |= dict.fromkeys(found)
        if not found or any((path / "config.yaml").is_file() for path in paths):
            others.append(pattern)
    return list(evaluations), others


if __name__ == "__main__":
    main(command_line)
