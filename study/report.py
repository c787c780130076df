"""Writes the report of an evaluation: tables of metrics and of texts as Markdown, and a figure.

    python -m study.report runs/evaluation      # the folder that an evaluation has written

The tasks' `evaluate.py` calls this; after `cory.evaluate` on a task of your own, it is the command above.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cory.config import UserError
from cory.run.jsonl import replace_text
from cory.run.settings import main
from study.tables import markdown_table, over_seeds

DIFFERENCES = 5  # queries shown for each model that differs from the base
OVER_SEEDS = "Mean ± standard deviation over seeds; a model without seeds has its own interval, as below.\n\n"
OVER_QUERIES = "Mean ± half-width of the 95 % interval over queries.\n\n"


def write_report(folder: Path) -> None:
    """Writes evaluation.md, and evaluation.png or pass_at_k.png, into the folder of an evaluation.

    Raises:
        UserError: the folder holds no evaluation that has ended.
    """
    from cory.evaluation import read_responses  # here, as importing torch takes seconds

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
    print(f"\nTables, texts and figure are in {folder}")


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


def command_line() -> None:
    """`python -m study.report`: see the module."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise UserError(
            f"expected the folder of an evaluation, as in: python -m study.report runs/evaluation\n{__doc__}"
        )
    write_report(Path(sys.argv[1]))


if __name__ == "__main__":
    main(command_line)
