"""Markdown tables that escape model output, and rows over seeds."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cory.run.report import one_line


def over_seeds(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of models that differ in their run's seed alone (RUN-seed0/agent_1, RUN-seed1/agent_1, ...) as one row.

    Args:
        rows: each with `name`, and for every metric its value and `METRIC_ci`, the half-width of its interval.

    Returns:
        rows of the same form; where several seeds are in one, its values are means over them, and `METRIC_ci` are
        their standard deviations; a model with one seed keeps its own interval. Empty if none has several.
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
