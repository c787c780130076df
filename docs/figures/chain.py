"""Draws what each role of a chain wrote for one query before and after training, from a run's summary.json.

python examples/lookout/make.py
python -m cory.train --config examples/lookout/lookout.yaml --output runs/strip
python docs/figures/chain.py runs/strip docs/figures/chain.svg 2     # the second query; default: the first
"""

import json
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

from cory.roles import text_of

plt.rcParams.update({"font.size": 18, "svg.hashsalt": "cory", "font.family": "sans-serif"})
COLOURS = ["#c1440e", "#1f6fb4"]  # one per role, as in method.py
INK, GREY, PAPER = "#333333", "#666666", "#f4f4f4"
# Sizes in points. The font is large because a phone shows the figure at a third of its size.
WIDTH, MARGIN, LINE = 660, 14, 25
COLUMN = (WIDTH - 3 * MARGIN) / 2
CHARACTERS_PER_POINT = 0.093

Line = tuple[str, dict[str, Any]]  # a line's text and its matplotlib properties


def draw(run: Path, path: Path, query: int = 1) -> None:
    """Writes the figure for one of a run's sample queries, counted from 1. The same run gives the same bytes.

    Exits with a message if the run has only one role, or fewer sample queries.
    """
    samples = json.loads((run / "summary.json").read_text(encoding="utf-8"))["samples"]
    if "chain" not in samples["before"]:
        sys.exit(f"RUN: expected the folder of a run with at least two roles, got {run}")
    chain = samples["before"]["chain"]
    queries = sum(record["role"] == chain[0]["role"] for record in chain)
    if not 1 <= query <= queries:
        sys.exit(f"QUERY: expected a number from 1 to {queries}, got {query}")

    # Records are sorted by role, so those of one query are `queries` apart.
    before = chain[query - 1 :: queries]
    after = samples["after"]["chain"][query - 1 :: queries]
    title = lines(before[0]["query"], WIDTH - 2 * MARGIN, color=INK)
    roles = [[response(record) for record in pair] for pair in zip(before, after, strict=True)]
    heights = [LINE * (1 + max(map(len, pair))) + MARGIN for pair in roles]
    height = LINE * (1 + len(title)) + 2 * MARGIN + sum(heights) + MARGIN * len(heights)

    figure = plt.figure(figsize=(WIDTH / 72, height / 72))
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axis.axis("off")
    write(axis, title, MARGIN, MARGIN)
    top = MARGIN + LINE * len(title) + MARGIN
    for column, moment in enumerate(["before training", "after training"]):
        write(axis, [(moment, {"color": GREY})], MARGIN + column * (COLUMN + MARGIN), top)
    top += LINE + MARGIN / 2

    for number, (pair, box_height) in enumerate(zip(roles, heights, strict=True)):
        colour = COLOURS[min(number, 1)]
        for column, record in enumerate([before[number], after[number]]):
            left = MARGIN + column * (COLUMN + MARGIN)
            box(axis, left, top, box_height, colour)
            heading = [(record["role"], {"color": colour})]
            reward = record.get("team_reward", record["task_reward"])
            earned = [(f"reward {round(reward, 2):g}", {"color": INK, "ha": "right"})]
            write(axis, heading, left + MARGIN, top + MARGIN / 2)
            write(axis, earned, left + COLUMN - MARGIN, top + MARGIN / 2)
            write(axis, pair[column], left + MARGIN, top + MARGIN / 2 + LINE)
        top += box_height + MARGIN
    figure.savefig(
        path, metadata={"Date": None} if path.suffix == ".svg" else None, facecolor="white"
    )
    plt.close(figure)


def response(record: dict[str, Any]) -> list[Line]:
    """Returns a role's prompt, with an ellipsis in place of the query, and its response in bold, as lines."""
    read = text_of(record["prompt"]).replace(record["query"], "…")
    width = COLUMN - 2 * MARGIN
    return lines(read, width, color=GREY) + lines(
        record["completion"].strip(), width, color=INK, weight="bold"
    )


def lines(text: str, width: float, **style: Any) -> list[Line]:
    """Breaks a text into lines of at most `width` points."""
    return [(line, style) for line in wrap(text, int(width * CHARACTERS_PER_POINT))]


def write(axis: plt.Axes, text: list[Line], left: float, top: float) -> None:
    """Writes lines one below the other."""
    for number, (line, style) in enumerate(text):
        axis.text(left, top + LINE * (number + 0.5), line, va="center", parse_math=False, **style)


def box(axis: plt.Axes, left: float, top: float, height: float, colour: str) -> None:
    """Draws a rounded box as wide as a column."""
    axis.add_patch(
        FancyBboxPatch(
            (left, top),
            COLUMN,
            height,
            boxstyle="round,pad=0,rounding_size=6",
            ec=colour,
            fc=PAPER,
            lw=1.6,
        )
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:4]))
