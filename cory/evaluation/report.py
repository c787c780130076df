"""The report of an evaluation: one HTML file with tables, a figure, and the models' responses side by side."""

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cory.run.folder import read_rows, short_labels
from cory.run.report import Page, Record, Table
from cory.run.tables import interval_rows


def evaluation_page(folder: Path) -> Page:
    """Returns the page of a finished evaluation, with each model's first response to the first `shown` queries."""
    # Imported late, as matplotlib takes a while to import.
    from cory.evaluation.plots import plot_evaluation
    from cory.run.plots import svg

    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    labels = row_labels([row["name"] for row in evaluation["rows"]])
    evaluation["rows"] = [row | {"name": labels[row["name"]]} for row in evaluation["rows"]]
    page = Page(folder.name, facts=list(evaluation["in_training"]), notes=evaluation["notes"])
    page.figure = svg(partial(plot_evaluation, evaluation))

    note = f"{evaluation['description']}. Mean ± half-width of the 95 % interval over queries."
    page.tables.append(
        Table("Held-out evaluation", interval_rows(evaluation["rows"], evaluation["titles"]), note)
    )
    if evaluation["costs"]:
        page.tables.append(
            Table("Cost of a query", interval_rows(evaluation["rows"], evaluation["costs"]))
        )

    chains: dict[tuple[str, int], list[Record]] = {}
    for record in read_rows(folder / "responses.jsonl"):
        if record["query"] < evaluation["settings"]["shown"]:
            response = {
                "query": evaluation["queries"][record["query"]],
                "columns": evaluation["columns"][record["query"]],
                "role": record["role"],
                "prompt": record["prompt"],
                "completion": record["completions"][0],
                "task_reward": record["rewards"][0],
                "team_reward": record.get("team_rewards", [None])[0],
                "kl": record["kl"][0],
            }
            earlier = chains.get((record["read"], record["query"]), [])
            chain = chains[record["model"], record["query"]] = [*earlier, response]
            page.add_chain(labels[record["model"]], chain)
    return page


def row_labels(names: Sequence[str]) -> dict[str, str]:
    """Maps the name of each row to its label: the same name, with the run's name shortened (`short_labels`)."""
    run = re.compile(r"\S+(?=/agent_)")
    labels = short_labels(run_name for name in names for run_name in run.findall(name))
    return {name: run.sub(lambda match: labels[match[0]], name) for name in names}
