"""Draws the method: `python docs/figures/method.py` writes method.svg beside this file."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

plt.rcParams.update({"font.size": 10, "svg.hashsalt": "cory", "font.family": "sans-serif"})
PIONEER, OBSERVER, INK, PAPER = "#c1440e", "#1f6fb4", "#333333", "#f4f4f4"


def box(
    axis: Any,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    edge: str,
    fill: str = "white",
) -> None:
    """Draws a rounded box with text. Its lower left corner is at (x, y)."""
    axis.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.06", ec=edge, fc=fill, lw=1.6)
    )
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=INK)


def arrow(
    axis: Any, start: tuple[float, float], end: tuple[float, float], colour: str = INK, **style: Any
) -> None:
    """Draws an arrow between two points."""
    options = {
        "arrowstyle": "-|>",
        "mutation_scale": 13,
        "lw": 1.5,
        "color": colour,
        "shrinkA": 0,
        "shrinkB": 0,
    } | style
    axis.add_patch(FancyArrowPatch(start, end, **options))


def draw(path: Path) -> None:
    """Writes the figure as SVG, with the same bytes each time."""
    figure, axis = plt.subplots(figsize=(9.2, 3.5))
    box(axis, 0.1, 1.9, 1.1, 0.6, "query $s_0$", INK, PAPER)
    box(axis, 2.3, 2.7, 2.0, 0.8, "pioneer\n(LLM 1)", PIONEER)
    box(axis, 2.3, 0.7, 2.0, 0.8, "observer\n(LLM 2)", OBSERVER)
    box(axis, 5.4, 2.8, 1.5, 0.6, "response $a_1$", PIONEER, PAPER)
    box(axis, 5.4, 0.8, 1.5, 0.6, "response $a_2$", OBSERVER, PAPER)
    box(
        axis, 8.1, 1.6, 2.2, 1.1, "for each LLM\n$r(s_0, a_1) + r(s_0, a_2)$\nminus its own KL", INK
    )
    arrow(axis, (1.3, 2.35), (2.2, 3.0))
    arrow(axis, (1.3, 2.05), (2.2, 1.2))
    arrow(axis, (4.4, 3.1), (5.3, 3.1), PIONEER)
    arrow(axis, (4.4, 1.1), (5.3, 1.1), OBSERVER)
    arrow(axis, (5.9, 2.7), (4.35, 1.5), PIONEER)
    axis.text(5.35, 1.95, "reads it", color=PIONEER, ha="left", va="center", fontsize=9)
    arrow(axis, (7.0, 3.0), (8.0, 2.45))
    arrow(axis, (7.0, 1.2), (8.0, 1.85))
    arrow(axis, (9.2, 2.75), (3.3, 3.65), INK, connectionstyle="arc3,rad=0.28", ls="--")
    arrow(axis, (9.2, 1.55), (3.3, 0.55), INK, connectionstyle="arc3,rad=-0.28", ls="--")
    axis.text(8.6, 3.75, "PPO update", ha="center", fontsize=9, color=INK)
    axis.text(8.6, 0.45, "PPO update", ha="center", fontsize=9, color=INK)
    arrow(axis, (2.5, 2.6), (2.5, 1.6), INK, arrowstyle="<|-|>")
    axis.text(
        2.62,
        2.1,
        "exchange roles\nevery 5 iterations",
        ha="left",
        va="center",
        fontsize=9,
        color=INK,
    )
    axis.set(xlim=(0, 10.5), ylim=(-0.1, 4.3))
    axis.axis("off")
    figure.savefig(
        path, bbox_inches="tight", pad_inches=0.05, metadata={"Date": None}, facecolor="white"
    )
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".svg"))
