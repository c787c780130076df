"""Draws a run's figure, and writes figures to files."""

import itertools
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib

if "MPLBACKEND" not in os.environ:  # notebooks name the backend that shows their figures
    matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from cory.metrics import CURVES, TITLES
from cory.run.folder import write_bytes
from cory.run.tables import natural

plt.rcParams["svg.hashsalt"] = "cory"  # makes SVG files reproducible

CURVE_TITLES = {name: TITLES[name] for name in CURVES}
SMOOTHING = 10  # iterations; a thin line shows the raw curve
LONG = 4000  # rows of metrics.jsonl, above which curves are rasterized to keep the SVG small
# Colours of PPO, CORY, then other methods or further agents.
COLOURS = ("#c1440e", "#1f6fb4", "#3a8f4b", "#8156a3", "#8a6100", "#00757f", "#b0307c", "#5b6470")
# Colours of matplotlib's tab20 that are neither red, blue nor grey; dark ones first.
FURTHER = (2, 18, 12, 16, 10, 3, 5, 9, 19, 13, 17, 11)
# Dashes with equally wide gaps, so that an identical curve beneath shows through.
LINES: tuple[Any, ...] = ("-", (0, (3, 3)), ":", "-.")


def plot_curves(
    history: Sequence[dict[str, Any]], path: Path, first_role: str = "pioneer", note: str = ""
) -> None:
    """Plots task reward, KL and combined reward of each agent over the iterations, as in the paper's Fig. 3.

    Any team reward has a panel of its own. Iterations count from 1. Held-out rewards are dots, each at the iteration
    after which it was measured; the evaluation before training is at 0.

    Args:
        history: rows of metrics.jsonl.
        path: the file to write.
        first_role: the name of the first role.
        note: text above the figure.

    Thick lines are running means over up to 10 iterations. The second agent's lines are dashed, so that both agents'
    curves stay visible where they are equal. Iterations in which the first agent is not the pioneer are shaded.
    """
    first = history[0]["agent"]
    first_records = [r for r in history if r["iteration"] == history[0]["iteration"]]
    # An agent that holds several roles at once has a curve per role.
    several_roles = len({record["agent"] for record in first_records}) < len(first_records)

    def label(record: dict[str, Any]) -> str:
        return f"{record['agent']} as {record['role']}" if several_roles else record["agent"]

    labels = natural({label(record) for record in history})
    observing = {r["iteration"] for r in history if r["agent"] == first and r["role"] != first_role}
    observing -= {
        r["iteration"] for r in history if r["agent"] == first and r["role"] == first_role
    }
    first_observing = sorted(k for k in observing if k - 1 not in observing)
    last_observing = sorted(k for k in observing if k + 1 not in observing)
    # A single curve has PPO's colour. Several curves start with CORY's.
    curve_colours = colours(1) if len(labels) == 1 else colours(1 + len(labels))[1:]
    titles = dict(CURVE_TITLES)
    if "team_reward" in history[0]:
        titles = {"team_reward": TITLES["team_reward"], **titles}
        if not any(record["task_reward"] for record in history):  # there is only a team reward
            titles.pop("task_reward", None)
    size = (13 / 3 * len(titles), 3.9)
    figure, axes = plt.subplots(1, len(titles), figsize=size, layout="constrained")
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for name, colour, line in zip(labels, curve_colours, itertools.cycle(LINES), strict=False):
            rows = [record for record in history if label(record) == name]
            x = [record["iteration"] + 1 for record in rows]
            y = [record[metric] for record in rows]
            axis.plot(x, y, color=colour, lw=0.7, alpha=0.4)
            axis.plot(x, running_mean(y, SMOOTHING), color=colour, ls=line, lw=1.8, label=name)
            held_out = held_out_points(rows, metric)
            if held_out:
                style = {"marker": "o", "ms": 3.5, "mec": "white", "mew": 0.5, "ls": ":"}
                axis.plot(
                    *zip(*held_out, strict=True), color=colour, label=f"{name}, held out", **style
                )
        for start, end in zip(first_observing, last_observing, strict=True):
            axis.axvspan(start + 0.5, end + 1.5, color="0.92", lw=0, zorder=0)
        axis.set(title=title, xlabel=f"iteration (thick: mean of up to {SMOOTHING})")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.margins(x=0.01)
        if len(history) > LONG:
            axis.set_rasterization_zorder(3)  # rasterizes curves, not axes or legend
        axis.spines[["top", "right"]].set_visible(False)
        if observing:
            axis.fill_between([], [], color="0.92", label=f"{first} observes")
    add_legend(figure, axes[0])
    if note:
        figure.suptitle(note, fontsize=9)
    save(figure, path)


def add_legend(figure: Figure, axis: Axes) -> None:
    """Adds an axis's legend below a figure, in as many columns as fit, up to four."""
    handles, labels = axis.get_legend_handles_labels()
    width = 0.07 * max(map(len, labels)) + 0.7  # inches per column
    columns = max(1, min(4, len(labels), int(figure.get_figwidth() / width)))
    figure.legend(
        handles, labels, loc="outside lower left", ncols=columns, frameon=False, fontsize=8
    )


def held_out_points(rows: Sequence[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    """Returns a metric's held-out values as (iterations trained, value); empty if there are none."""
    name = f"eval_{metric}"
    before = [(0, row[f"{name}_before"]) for row in rows if f"{name}_before" in row]
    return before + [(row["iteration"] + 1, row[name]) for row in rows if name in row]


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as SVG, PDF or PNG. A PNG has 256 colours, which makes it a third of the full-colour size."""
    if path.suffix in (".svg", ".pdf"):
        figure.savefig(path, dpi=130)
        plt.close(figure)
        return
    drawn = BytesIO()
    figure.savefig(drawn, dpi=130)
    plt.close(figure)
    stored = BytesIO()
    Image.open(drawn).convert("RGB").quantize(256).save(stored, "PNG", optimize=True)
    write_bytes(path, stored.getvalue())


def svg(draw: Callable[[Path], None]) -> str:
    """Renders a figure as an <svg> element without a background, for an HTML page.

    Args:
        draw: a function that saves the figure to a path, such as `plot_curves` with its other arguments bound.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        plt.rc_context({"svg.fonttype": "none", "savefig.transparent": True}),
    ):
        path = Path(folder) / "figure.svg"
        draw(path)
        text = path.read_text(encoding="utf-8")
    # Metadata holds the time, which would make the text differ between calls.
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Averages each value with the `width - 1` values before it (fewer at the start)."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means


def colours(count: int) -> list[Any]:
    """Returns `count` colours, distinct up to 20."""
    tab20 = plt.get_cmap("tab20")
    further = itertools.cycle([tab20(index) for index in FURTHER])
    return list(itertools.islice(itertools.chain(COLOURS, further), count))
