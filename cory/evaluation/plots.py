"""The figure of an evaluation: pass@k over k if requested, otherwise a bar for each row and metric.

Error bars are 95 % intervals. Rows of one run share a colour.
"""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from cory.run.plots import LINES, colours, save

PANELS = 4  # per row of a figure
LABEL = 40  # characters per line of a label
PPO, CORY = colours(2)
UNTRAINED = "0.6"  # the colour of the base


def plot_evaluation(evaluation: Mapping[str, Any], path: Path) -> None:
    """Draws the figure of the contents of evaluation.json."""
    rows = evaluation["rows"]
    row_colours = evaluation_colours([row["name"] for row in rows])
    # pass@k exists only for rewards of 0 and 1.
    ks = [k for k in evaluation["settings"]["ks"] if all(f"pass@{k}" in row for row in rows)]
    if ks:
        plot_pass_at_k(rows, ks, path, row_colours, over="queries")
    else:
        plot_bars(rows, evaluation["titles"], path, row_colours)


def evaluation_colours(names: Sequence[str]) -> list[Any]:
    """Returns the colours of the rows. Rows of one run have the same colour."""
    runs = [name.split("/agent_")[0] for name in names]
    agents: dict[str, set[str]] = {}
    for run, name in zip(runs, names, strict=True):
        agents.setdefault(run, set()).update(re.findall(r"agent_\d+", name))
    # Leave out `base`, `base after itself` and `base of RUN`.
    trained = {
        run: len(agent_names) for run, agent_names in agents.items() if run.split()[0] != "base"
    }
    run_colours = colours_by_agents(trained)
    return [run_colours.get(run, UNTRAINED) for run in runs]


def colours_by_agents(agents: Mapping[str, int]) -> dict[str, Any]:
    """Assigns colours: PPO's to the first run with one agent, CORY's to the first with several, others to the rest.

    Args:
        agents: the number of agents, by the name of a run, or of a group of runs that differ only in their seed.
    """
    assigned: dict[str, Any] = {}
    one = [name for name, count in agents.items() if count == 1]
    several = [name for name, count in agents.items() if count > 1]
    for names, colour in ((one, PPO), (several, CORY)):
        assigned |= dict.fromkeys(names[:1], colour)
    others = [name for name in agents if name not in assigned]
    return assigned | dict(zip(others, colours(2 + len(others))[2:], strict=True))


def plot_bars(
    rows: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, str],
    path: Path,
    row_colours: Sequence[Any],
) -> None:
    """Draws one panel per metric, four side by side, with one bar and its 95 % interval per row of the table.

    Args:
        rows: table rows with `name` and, for every metric, its value and `METRIC_ci`, its interval's half-width.
        metrics: titles by metric.
        row_colours: the colour of each row.
    """
    names = [textwrap.fill(row["name"], LABEL) for row in rows]
    across = min(PANELS, len(metrics))
    down = -(-len(metrics) // across)
    size = (2.8 + 2.4 * across, down * (0.15 * sum(2 + name.count("\n") for name in names) + 0.9))
    figure, axes = plt.subplots(
        down, across, figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    for axis in axes.flat[len(metrics) :]:
        axis.set_visible(False)
    for axis, (metric, title) in zip(axes.flat, metrics.items(), strict=False):
        values = [row.get(metric, math.nan) for row in rows]
        errors = [_half_width(row, metric) for row in rows]
        axis.barh(
            range(len(names)),
            values,
            xerr=errors,
            color=row_colours,
            height=0.6,
            error_kw={"lw": 1, "capsize": 3},
            tick_label=names,
        )
        axis.set_title(textwrap.fill(title, LABEL), fontsize=10)
        axis.axvline(0, color="0.3", lw=0.8)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].invert_yaxis()
    figure.supxlabel("error bars: 95 % intervals over queries", fontsize=8)
    save(figure, path)


def plot_pass_at_k(
    rows: Sequence[Mapping[str, Any]],
    ks: Sequence[int],
    path: Path,
    row_colours: Sequence[Any],
    over: str,
) -> None:
    """Draws pass@k over k, a line with 95 % intervals per model, as in the paper's Fig. 5.

    Args:
        rows: table rows with `name` and, for every k, `pass@k` and `pass@k_ci`, its interval's half-width.
        row_colours: the colour of each row. Rows of one colour get different line styles.
        over: the sampling unit of the intervals, such as `seeds`.
    """
    many = len(rows) > 4
    figure, axis = plt.subplots(
        figsize=(9, max(4, 0.32 * len(rows))) if many else (6.5, 4), layout="constrained"
    )
    for index, (row, colour) in enumerate(zip(rows, row_colours, strict=True)):
        same_colour = list(row_colours[:index]).count(colour)
        values = [row[f"pass@{k}"] for k in ks]
        errors = [_half_width(row, f"pass@{k}") for k in ks]
        axis.errorbar(
            ks,
            values,
            errors,
            label=textwrap.fill(row["name"], LABEL),
            ls=LINES[same_colour % len(LINES)],
            marker="o",
            ms=3,
            lw=1.4,
            capsize=2,
            color=colour,
        )
    axis.set(xlabel=f"k (error bars: 95 % intervals over {over})", ylabel="pass@k")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, [str(k) for k in ks])
    axis.spines[["top", "right"]].set_visible(False)
    location: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if many else {}
    axis.legend(frameon=False, fontsize=8, **location)
    save(figure, path)


def _half_width(row: Mapping[str, Any], metric: str) -> float:
    """Returns the half-width of a metric's interval; nan if it has none."""
    half_width = row.get(f"{metric}_ci")
    return math.nan if half_width is None else half_width
