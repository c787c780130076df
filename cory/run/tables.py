"""Tables of evaluations and comparisons, for the terminal and as Markdown."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cory.run.report import one_line

DIFFERENCES = 5  # queries shown for each model that differs from the base
OVER_SEEDS = "Mean ± standard deviation over seeds; a model without seeds has its own interval, as below.\n\n"
OVER_QUERIES = "Mean ± half-width of the 95 % interval over queries.\n\n"


def text_table(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """A line per model, each metric with the half-width of its interval."""
    name = max(len(row["name"]) for row in rows)
    cells = [[f"{row[m]:.3f} +- {row[f'{m}_ci']:.3f}" for m in titles] for row in rows]
    widths = [max(len(title), *(len(line[i]) for line in cells)) for i, title in enumerate(titles.values())]
    lines = [" " * name + "".join(f"  {title:>{w}}" for title, w in zip(titles.values(), widths, strict=True))]
    for row, line in zip(rows, cells, strict=True):
        lines.append(f"{row['name']:{name}}" + "".join(f"  {c:>{w}}" for c, w in zip(line, widths, strict=True)))
    return "\n".join(lines)


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


def over_seeds(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of models that differ in their run's seed alone (RUN-seed0/agent_1, RUN-seed1/agent_1, ...) as one row.

    Args:
        rows: each with `name`, and for every metric its value and `METRIC_ci`, the half-width of its interval.

    Returns:
        rows of the same form; where several seeds are in one, its values are means over them, and `METRIC_ci` are
        their standard deviations; a model that is there once keeps its own interval. Empty where none has several.
    """
    import pandas as pd  # here, as the training's commands do without it

    frame = pd.DataFrame([dict(row) for row in rows])
    metrics = [column.removesuffix("_ci") for column in frame.columns if column.endswith("_ci")]
    groups = frame.groupby(frame["name"].str.replace(r"-seed\d+(?=/|$)", "", regex=True), sort=False)
    if len(groups) == len(rows):
        return []
    result = []
    for name, of in groups:
        several = len(of) > 1
        one: dict[str, Any] = {"name": f"{name}, {len(of)} seeds" if several else name}
        for metric in metrics:
            one[metric] = float(of[metric].mean())
            one[f"{metric}_ci"] = float(of[metric].std() if several else of[f"{metric}_ci"].iloc[0])
        result.append(one)
    return result


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of equal keys as a table; a model's text cannot act as Markdown, HTML or terminal control."""
    if not rows:
        return "None.\n"
    lines = ["| " + " | ".join(map(_literal, rows[0])) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(_literal(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    text = one_line(text)
    harmless = {found.start() for found in re.finditer(r"(?<=[^\W_])_(?=[^\W_])", text)}  # as in agent_1
    acting = "<>&|`*_[]#~\\$"
    return "".join(f"&#{ord(c)};" if c in acting and i not in harmless else c for i, c in enumerate(text)).strip()
