"""Makes Markdown tables and their cells: means and differences over seeds, and titles of metrics."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import pandas as pd

from cory.metrics import TITLES
from cory.run.tables import markdown
from study.intervals import difference, over_seeds

Rows: TypeAlias = list[dict[str, str]]  # a table's rows; each maps column titles to cells

OWN_KL_REWARD = "own_kl_reward"  # the combined reward if only the last answer's KL counts


def column_title(metric: str) -> str:
    """Returns a metric's title in tables, without the unit; a task's own metric keeps its name."""
    if metric == OWN_KL_REWARD:
        return f"{TITLES['combined_reward']}, own KL"
    if metric not in TITLES:
        return metric
    return TITLES[metric].partition(" (")[0]


def is_share(metric: str) -> bool:
    """Whether a metric is a share, shown in percent."""
    return metric.startswith(("pass@", "maj@")) or metric in (
        "greedy",
        "copied",
        "unparseable",
    )


def mean_cell(values: "pd.Series[float]", metric: str) -> str:
    """Formats the mean over seeds and its interval; empty without values.

    If no value is below 0 but the interval reaches below 0, there are too few seeds, and the interval is left out. The
    intervals of rewards are always shown.
    """
    values = values.dropna()
    if not len(values):
        return ""
    interval = over_seeds(values)
    if "reward" not in metric and interval.low < 0 <= values.min():
        interval = interval._replace(low=math.nan, high=math.nan)
    percent = is_share(metric)
    return interval.plus_minus(0 if percent else 2, percent)


def difference_cell(by_seed: pd.DataFrame, name: str, base: str | None, metric: str) -> str:
    """Formats a group's difference from its baseline; empty for the baseline itself, or if either has no values.

    `by_seed` has a column per group and a row per seed.
    """
    if base is None or base == name or name not in by_seed or base not in by_seed:
        return ""
    ours, theirs = by_seed[name].dropna(), by_seed[base].dropna()
    if not len(ours) or not len(theirs):
        return ""
    return difference_text(ours, theirs, metric)


def difference_text(ours: "pd.Series[float]", theirs: "pd.Series[float]", metric: str) -> str:
    """Formats the difference between two groups' values by seed, with its interval; shares are in percent."""
    scale, digits = (100, 0) if is_share(metric) else (1, 2)
    return difference(scale * ours, scale * theirs).text(f"+.{digits}f")


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Formats rows with equal keys as a Markdown table. Markdown, HTML and terminal control in cells are escaped."""
    if not rows:
        return "None.\n"
    if any(list(row) != list(rows[0]) for row in rows):
        raise ValueError(f"expected rows of one table to have the same columns, got {rows}")
    lines = [
        f"| {' | '.join(markdown(cell) for cell in cells)} |"
        for cells in (list(rows[0]), *(row.values() for row in rows))
    ]
    rule = "|" + "---|" * len(rows[0])
    return "\n".join([lines[0], rule, *lines[1:], ""])
