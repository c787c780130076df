"""Figures of comparisons: curves over seeds, results over a setting, frontiers."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from cory.report.plots import CURVE_TITLES, SMOOTHING, colours
from study.comparison import Curve, Point
from study.statistics import nondominated


def plot_comparison(curves: Sequence[Curve], path: Path) -> None:
    """Task reward, KL and combined reward as in the paper's Fig. 3: mean and one standard deviation over runs.

    Where runs have different lengths, each iteration counts those that reached it. Written as PNG and SVG.
    """
    groups = max((curve.number for curve in curves), default=0) + 1
    figure, axes = plt.subplots(1, len(CURVE_TITLES), figsize=(13, 3.8), layout="constrained")
    for axis, (metric, title) in zip(axes, CURVE_TITLES.items(), strict=True):
        for curve in curves:
            runs = curve.values[metric]
            smooth = runs.rolling(SMOOTHING, min_periods=1).mean().where(runs.notna())
            mean, std = smooth.mean(axis=1), smooth.std(axis=1).fillna(0.0)
            number = curve.number if groups > 1 else curve.place  # the agents of a single method, as in a report
            colour, style = colours(number + 1)[-1], ("-", "--", ":", "-.")[curve.place % 4]
            axis.plot(mean, color=colour, ls=style, lw=1.6, label=f"{curve.name} (n = {runs.shape[1]})")
            axis.fill_between(mean.index, mean - std, mean + std, color=colour, alpha=0.15, lw=0)
        axis.set(title=title, xlabel="iteration")
        axis.margins(x=0.01)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False, fontsize=8)
    _save(figure, path)


def plot_over(points: Sequence[Point], key: str, path: Path) -> None:
    """The final metrics over the values of a key, a line for each family; bars are one standard deviation.

    A family that the key does not concern (value None) is a level line.
    """
    families = list(dict.fromkeys(point.family for point in points))
    values = list(dict.fromkeys(point.value for point in points if point.value is not None))
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    figure, axes = plt.subplots(1, len(CURVE_TITLES), figsize=(13, 3.6), layout="constrained")
    for axis, (metric, title) in zip(axes, CURVE_TITLES.items(), strict=True):
        for number, family in enumerate(families):
            colour = colours(len(families))[number]
            own = [point for point in points if point.family == family]
            for point in (point for point in own if point.value is None):
                axis.axhline(statistics.fmean(point.values[metric]), color=colour, ls="--", lw=1.2, label=family)
            own = [point for point in own if point.value is not None]
            if own:
                own = sorted(own, key=lambda point: point.value) if numeric else own
                x = [point.value if numeric else values.index(point.value) for point in own]
                y, bars = zip(*(_mean_std(point.values[metric]) for point in own), strict=True)
                axis.errorbar(x, y, bars, color=colour, marker="o", ms=4, lw=1.4, capsize=3, label=family)
        if numeric and values and min(values) > 0 and max(values) >= 8 * min(values):
            axis.set_xscale("log")
        if not numeric:
            axis.set_xticks(range(len(values)), list(map(str, values)))
        elif len(values) <= 6:
            axis.set_xticks(values, [f"{value:g}" for value in values])
            axis.set_xticks([], minor=True)
        axis.set(title=title, xlabel=key)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    _save(figure, path)


def plot_frontier(points: Sequence[Point], key: str, path: Path) -> None:
    """Task reward against KL, a point for each value of a key (paper, Fig. 2c); lines join those not dominated."""
    families = list(dict.fromkeys(point.family for point in points))
    figure, axis = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    for number, family in enumerate(families):
        own = [point for point in points if point.family == family]
        rewards, reward_bars = zip(*(_mean_std(point.values["task_reward"]) for point in own), strict=True)
        kls, kl_bars = zip(*(_mean_std(point.values["kl"]) for point in own), strict=True)
        colour = colours(len(families))[number]
        axis.errorbar(
            rewards, [-kl for kl in kls], kl_bars, reward_bars, fmt="o", color=colour, ms=5, lw=0.9, capsize=2
        )
        best = nondominated(list(zip(rewards, (-kl for kl in kls), strict=True)))
        line = sorted((rewards[i], -kls[i]) for i in best)
        axis.plot([x for x, _ in line], [y for _, y in line], color=colour, lw=1.4, label=family)
        for point, x, kl in zip(own, rewards, kls, strict=True):
            if point.value is None:
                continue
            axis.annotate(f"{point.value:g}" if isinstance(point.value, float) else str(point.value), (x, -kl),
                          textcoords="offset points", xytext=(5, 4), fontsize=7, color=colour)  # fmt: skip
    axis.set(xlabel="task reward", ylabel="-KL (nats)", title=f"frontier over {key}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    _save(figure, path)


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _save(figure: Any, path: Path) -> None:
    for kind in (".png", ".svg"):
        figure.savefig(path.with_suffix(kind), dpi=130, metadata={"Date": None} if kind == ".svg" else None)
    plt.close(figure)
