"""Markdown tables that escape model output, the tables of a comparison, and rows over seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cory.report import tables
from study.comparison import FINAL, Comparison
from study.measures import LAST, spread
from study.statistics import Interval, with_interval


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
        for metric in (metric for metric in metrics if of[metric].notna().all()):
            one[metric] = float(of[metric].mean())
            one[f"{metric}_ci"] = float(of[metric].std() if several else of[f"{metric}_ci"].iloc[0])
        result.append(one)
    return result


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of equal keys as a table; a model's text cannot act as Markdown, HTML or terminal control."""
    return f"{tables.markdown_table(list(rows[0]), [list(row.values()) for row in rows])}\n" if rows else "None.\n"


def eta_shown(comparison: Comparison) -> str:
    """The eta of the combined reward, for a sentence."""
    return "each run's own eta" if comparison.over == "ppo.init_kl_coef" else f"{comparison.eta:g}"


def final_table(comparison: Comparison) -> list[dict[str, str]]:
    """The metrics over the last iterations, by agent."""
    return [
        {"agent": row["name"], "n": str(row["n"]), **{title: spread(row[metric]) for metric, title in FINAL.items()}}
        for row in comparison.final_rows()
    ]


def group_table(comparison: Comparison) -> list[dict[str, str]]:
    """By group: policy optimality, collapse rate, training variance, and the differences to the baseline."""
    table, rows = [], comparison.group_rows()
    absolute = any(row.get("near_zero") for row in rows)  # of one column, all
    for row in rows:
        changes = [row.get(f"{key}_change") for key in ("optimality", "variance")]
        table.append(
            {
                "group": row["name"],
                "n": str(row["n"]),
                "policy optimality": spread(row["policy_optimality"]),
                "difference to baseline": _absolute(row) if absolute else _percent(changes[0]),
                "collapse rate": f"{row['collapse_rate']:.0%}",
                "training variance": f"{row['training_variance']:.3g}" if row["n"] > 1 else "",
                "difference": _percent(changes[1]) if row["n"] > 1 else "",
            }
        )
    return table


def _percent(change: Interval | None) -> str:
    return "" if change is None or math.isnan(change[0]) else with_interval(change, "+.0%")


def _absolute(row: dict[str, Any]) -> str:
    return f"{with_interval(change, '+.3f')}, absolute" if (change := row.get("optimality_difference")) else ""


def method_note(comparison: Comparison) -> str:
    """What the columns of `group_table` mean."""
    return (
        f"Baseline: {comparison.baseline}. Policy optimality: mean combined reward over the last {LAST} "
        "iterations and over agents. Training variance: of the task reward (mean over agents) across seeds, mean over "
        "iterations; the mean of two agents is of twice the responses, which by itself lowers it. "
        "Differences are relative to the size of the baseline's value (absolute if one baseline is near 0), with the "
        "95 % interval of 10,000 bootstrap resamples of the seeds: rough at few seeds, and none where there is a "
        "single one (of a variance: or two).\n"
    )
