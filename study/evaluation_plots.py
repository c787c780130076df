"""Figures of an evaluation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from cory.report.plots import colours
from cory.run.output import replacing


def plot_bars(rows: Sequence[dict[str, Any]], metrics: dict[str, str], path: Path) -> None:
    """One panel per metric, one bar with its 95 % interval per row.

    Args:
        rows: each with `name`, and for every metric its value and `METRIC_ci`, the half-width of its interval.
        metrics: key to title.
    """
    names = [row["name"] for row in rows]
    size = (3.2 * len(metrics), 0.4 * len(rows) + 1.6)
    figure, axes = plt.subplots(1, len(metrics), figsize=size, layout="constrained", squeeze=False)
    for axis, (metric, title) in zip(axes[0], metrics.items(), strict=True):
        values, errors = [row[metric] for row in rows], [row[f"{metric}_ci"] for row in rows]
        axis.barh(names, values, xerr=errors, color=colours(len(rows)), height=0.6, error_kw={"lw": 1, "capsize": 3})
        axis.set(title=title)
        axis.invert_yaxis()
        axis.axvline(0, color="0.3", lw=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        if axis is not axes[0, 0]:
            axis.set_yticklabels([])
    with replacing(path) as partial:
        figure.savefig(partial, dpi=130)
    plt.close(figure)


def plot_pass_at_k(rows: Sequence[dict[str, Any]], ks: Sequence[int], path: Path) -> None:
    """pass@k over k, a line with its 95 % interval per model, as in the paper's Fig. 5.

    Args:
        rows: each with `name`, and for every k `pass@k` and `pass@k_ci`, the half-width of its interval.
    """
    many = len(rows) > 4
    figure, axis = plt.subplots(figsize=(9, max(4, 0.24 * len(rows))) if many else (6.5, 4), layout="constrained")
    for row, colour in zip(rows, colours(len(rows)), strict=True):
        values, errors = ([row[f"pass@{k}{suffix}"] for k in ks] for suffix in ("", "_ci"))
        style = "-" if " after " not in row["name"] else "--"
        axis.errorbar(
            ks, values, errors, label=row["name"], ls=style, marker="o", ms=3, lw=1.4, capsize=2, color=colour
        )
    axis.set(xlabel="k", ylabel="pass@k")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, [str(k) for k in ks])
    axis.spines[["top", "right"]].set_visible(False)
    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if many else {}
    axis.legend(frameon=False, fontsize=8, **beside)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=130)
    plt.close(figure)
