"""How time and memory of a CORY iteration grow with batch size, lengths, width and number of agents.

    python benchmarks/scaling.py --out results/speed

Each point is measured in a process of its own (benchmarks/iteration.py).
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.iteration import hardware, measured_apart, table  # noqa: E402
from benchmarks.shapes import SHAPES, Shape  # noqa: E402

SCALES = {
    "batch": [16, 32, 64, 128],
    "response": [8, 16, 32, 64],
    "observer": [14, 32, 64, 128],
    "width": [128, 256, 512, 768],
    "agents": [1, 2, 3, 4],
}
SCALE_TITLES = {
    "batch": "queries per iteration",
    "response": "tokens per response",
    "observer": "tokens that the observer's prompt adds",
    "width": "model width",
    "agents": "agents",
}


def scaling(options: argparse.Namespace, shape: Shape) -> tuple[str, dict[str, Any]]:
    """Seconds and memory of our iteration as one size changes, each in a process of its own."""
    points: dict[str, list[dict[str, float]]] = {}
    rows = []
    for key, values in SCALES.items():
        points[key] = []
        for value in values:
            scaled = replace(shape, **{key: value})  # type: ignore[arg-type]
            measured = measured_apart(options, scaled, "ours", "point")
            points[key].append({"value": value, **measured})
            cells = [f"{measured['seconds']:.2f}", f"{measured['peak']:.0f}"]
            rows.append([SCALE_TITLES[key], str(value), *cells])
    _, *pairs = points["agents"]  # one agent has no observer, whose prompts are longer
    each = (pairs[-1]["peak"] - pairs[0]["peak"]) / (pairs[-1]["value"] - pairs[0]["value"])
    owned = 3 * pairs[0]["weights"]
    text = table(rows, ["over", "", "s per iteration", "peak MiB"])
    text += (
        f"\n\nAn agent more than two: {each:.0f} MiB. Its weights and Adam's two moments are {owned:.0f} MiB of them; "
        f"{each - owned:.0f} MiB are beyond."
    )
    return text, {"points": points, "shape": asdict(shape), "hardware": hardware()}


def plot_scaling(points: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Seconds and memory against each size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, len(points), figsize=(3 * len(points), 5), layout="constrained", sharey="row"
    )
    for column, (key, rows) in enumerate(points.items()):
        x = [row["value"] for row in rows]
        for axis, name, colour in zip(
            axes[:, column], ("seconds", "peak"), ("#c1440e", "#1f6fb4"), strict=True
        ):
            axis.plot(x, [row[name] for row in rows], "o-", color=colour)
            axis.set(xlabel=SCALE_TITLES[key], xlim=(0, None), xticks=x)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("seconds per iteration")
    axes[1, 0].set_ylabel("peak memory, MiB")
    for row in axes[:, 0]:
        row.set_ylim(0, None)  # shared by the row, so once all is drawn
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small_pair")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--out", type=Path, help="folder for NAME.md, NAME.json and NAME.png")
    options = parser.parse_args()
    text, numbers = scaling(options, SHAPES[options.shape])
    print(f"scaling, {options.shape}, {options.precision}, {hardware()}\n\n{text}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"scaling_{options.shape}_{options.precision}"
        (options.out / f"{name}.md").write_text(text + "\n")
        plot_scaling(numbers["points"], options.out / f"{name}.png")
        (options.out / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
