"""Tables of one evaluation: `evaluation.md`, with its models that differ in their run's seed alone also as one row."""

from collections.abc import Mapping, Sequence
from typing import Any

from cory.run.tables import interval_rows
from study.intervals import over_seeds
from study.markdown import markdown_table

DIFFERENCES = 5  # queries shown for each model that differs from the base
OVER_SEEDS = "Mean ± half-width of the 95 % interval over seeds; a model without seeds has its own, as below."
OVER_QUERIES = "Mean ± half-width of the 95 % interval over queries."
Row = Mapping[str, Any]


def rows_over_seeds(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of models that differ in their run's seed alone (RUN-seed0/agent_1, RUN-seed1/agent_1, ...) as one row.

    Args:
        rows: each with `name`, and for every metric its value and `METRIC_ci`, the half-width of its interval.

    Returns:
        rows of the same form; where several seeds are in one, its values are means over them, and `METRIC_ci` the
        half-widths by Student's t; a model with one seed keeps its own interval. Empty if none has several.
    """
    import pandas as pd  # here, as importing it takes a while

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
            row[metric] = interval.value
            row[f"{metric}_ci"] = (
                interval.high - interval.value if seeds > 1 else float(runs[f"{metric}_ci"].iloc[0])
            )
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
