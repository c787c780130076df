"""Where does cooperation pay? The advantage of a chain over two calls of one model, against its observer's dependence.

    python -m study.advantage results/when/settings.yaml --out results/when

The file lists settings, each with a folder of results (those of `study.experiment`, whose held_out.csv it reads; where
the evaluation had `--samples 2`, the better response of two is shown, too) and the probe of its untrained model
(`observer.py --out`):

    - label: GSM8K, toy
      results: results/gsm8k_credit
      observer: results/when/gsm8k/observer.json
      chain: collective               # the name of a group
      single: PPO
      order: agent_2 after agent_1    # of a pair with fixed roles; without it, the mean of both orders

Writes advantage.md, a table, and advantage.png.
"""

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cory.cli.arguments import Arguments
from cory.cli.main import main
from cory.errors import UserError, expect
from cory.run.output import check_results_folder, staged
from study.intervals import Interval, difference, over_seeds

KEYS = {"label", "results", "observer", "chain", "single"}
ORDER = "order"  # the key that may be left out
CALLS = {"alone": 1, "after itself": 2}  # of one agent
MARKERS = "os^Dv"


@dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        dependence, slope: of the untrained observer's reward on what it reads (docs/metrics.md).
        scale: standard deviation of the untrained pioneer's task reward.
        one: for each seed, the combined rewards of one agent by CALLS. untrained: that of the base after itself.
        chain: those of the pair, mean of both orders, or in the order named.
        best_of_2: task rewards of one agent's better response of two; empty if each query was answered once.
    """

    label: str
    dependence: Interval
    slope: Interval
    scale: float
    one: list[dict[str, float]]
    untrained: float
    chain: list[float]
    best_of_2: list[float]

    def rivals(self) -> dict[str, list[float]]:
        """The combined rewards of what the chain is compared with: CALLS, and the untrained model after itself."""
        by_calls = {f"one agent, {calls}": [seed[calls] for seed in self.one] for calls in CALLS}
        return by_calls | {"untrained, after itself": [self.untrained] * len(self.one)}

    def best_rival(self) -> str:
        """The rival with the highest mean."""
        rivals = self.rivals()
        return max(rivals, key=lambda name: statistics.fmean(rivals[name]))

    def advantage(self) -> Interval:
        """Of the chain over the best rival, in units of `scale`, by Student's t over seeds."""
        import pandas as pd  # here, as importing it takes a while

        apart = difference(pd.Series(self.chain), pd.Series(self.rivals()[self.best_rival()]))
        return Interval(
            apart.value / self.scale, apart.low / self.scale, apart.high / self.scale, apart.n
        )


def read_settings_file(path: Path, root: Path = Path()) -> list[Setting]:
    """The settings that a file lists; paths are relative to `root`. Raises a UserError on bad ones."""
    try:
        listed = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"expected a list of settings, got {str(path)!r} ({error})") from None
    expect(isinstance(listed, list) and bool(listed), str(path), "a list of settings", listed)
    for number, entry in enumerate(listed):
        ok = isinstance(entry, dict) and set(entry) - {ORDER} == KEYS
        expect(ok, f"{path}, setting {number + 1}", f"the keys {', '.join(sorted(KEYS))}", entry)
    return [_setting(entry, root) for entry in listed]


def _setting(entry: dict[str, Any], root: Path) -> Setting:
    from study.frame import BASE, read_study  # here, as importing pandas takes a while

    label = entry["label"]
    held_out = read_study(root / entry["results"]).held_out
    try:
        probe = json.loads((root / entry["observer"]).read_text(encoding="utf-8"))
        reading = probe["readings"][0]
        dependence = _interval(reading["dependence"])
        slope = _interval(reading["slope"])
        scale = float(probe["spread"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        expected = "what observer.py --out has written"
        raise UserError(
            f"{label}: expected {expected}, got {entry['observer']!r} ({error})"
        ) from None

    def by_seed(group: str, metric: str, **chosen: Any) -> list[float]:
        """A metric of a group's rows with some values, by seed, mean over agents or orders."""
        rows = held_out[held_out["group"] == group]
        for key, value in chosen.items():
            rows = rows[rows[key] == value]
        return [float(value) for value in rows.groupby("seed")[metric].mean()]

    for key in ("single", "chain"):
        if entry[key] not in set(held_out["group"]):
            groups = sorted(set(held_out["group"]) - {BASE})
            raise UserError(f"{label}, {key}: expected one of {groups}, got {entry[key]!r}")
    order = entry.get(ORDER)
    chosen = {"answers": order} if order else {"calls": 2}
    chain = by_seed(entry["chain"], "combined_reward", **chosen)
    if not chain:
        raise UserError(
            f"{label}, {ORDER}: expected a chain of {entry['chain']!r}, such as agent_2 after agent_1, got {order!r}"
        )
    alone, twice = (
        by_seed(entry["single"], "combined_reward", calls=calls) for calls in CALLS.values()
    )
    untrained = held_out[(held_out["group"] == BASE) & (held_out["calls"] == 2)]
    if len(alone) != len(twice) or not len(untrained):
        raise UserError(
            f"{label}: expected {entry['single']!r} and the base after themselves, got no such rows"
        )
    one = [dict(zip(CALLS, values, strict=True)) for values in zip(alone, twice, strict=True)]
    best = by_seed(entry["single"], "best_of_2", calls=1) if "best_of_2" in held_out else []
    base = float(untrained["combined_reward"].iloc[0])
    return Setting(label, dependence, slope, scale, one, base, chain, best)


def _interval(numbers: Sequence[float | None]) -> Interval:
    """An interval of a file, where null stands for NaN: the observer's reward never varied."""
    value, low, high = (math.nan if number is None else number for number in numbers[:3])
    return Interval(value, low, high, 0)


def table(settings: Sequence[Setting]) -> str:
    """The settings as a Markdown table."""
    from study.markdown import markdown_table

    return markdown_table(
        [
            {"setting": s.label, "n": str(len(s.chain))}
            | {"dependence": s.dependence.text(".2f"), "slope": s.slope.text(".2f")}
            | {
                name: _shown(values)
                for name, values in s.rivals().items()
                if not name.startswith("untrained")
            }
            | {"untrained, after itself": f"{s.untrained:.2f}", "chain": _shown(s.chain)}
            | {
                "advantage": s.advantage().text("+.2f"),
                "best of 2, task reward": _shown(s.best_of_2),
            }
            for s in settings
        ]
    )


def _shown(values: Sequence[float]) -> str:
    return over_seeds(values).plus_minus() if values else ""


def short_rows(settings: Sequence[Setting]) -> list[dict[str, str]]:
    """The settings as rows of a short table: dependence, slope, the best rival, the chain, and its advantage."""
    return [
        {
            "setting": s.label,
            "n": str(len(s.chain)),
            "dependence": f"{s.dependence.value:.2f}",
            "slope": f"{s.slope.value:.2f}",
            "best rival": f"{statistics.fmean(s.rivals()[s.best_rival()]):.2f} {s.best_rival()}",
            "chain": f"{statistics.fmean(s.chain):.2f}",
            "advantage": s.advantage().text("+.2f"),
        }
        for s in settings
    ]


def plot(settings: Sequence[Setting], path: Path) -> None:
    """Advantage over dependence, both with their 95 % intervals. Filled: the interval of the slope is above 0.

    What stands before the last comma of a label has a colour, what stands after it a marker.
    """
    import matplotlib.pyplot as plt

    from cory.report.plots import colours

    figure, axis = plt.subplots(figsize=(8.5, 4.6), layout="constrained")
    axis.axhline(0, color="0.3", lw=0.8)
    parts = [setting.label.rpartition(", ") for setting in settings]
    tasks = list(dict.fromkeys(task or kind for task, _, kind in parts))
    kinds = list(dict.fromkeys(kind for task, _, kind in parts if task))
    colour = dict(zip(tasks, colours(len(tasks)), strict=True))
    for setting, (task, _, kind) in zip(settings, parts, strict=True):
        x, left, right, _ = setting.dependence
        y, low, high, _ = setting.advantage()
        marker = MARKERS[kinds.index(kind) % len(MARKERS)] if task else MARKERS[0]
        style: dict[str, Any] = {
            "marker": marker,
            "ms": 6,
            "lw": 1.2,
            "capsize": 2,
            "color": colour[task or kind],
        }
        style |= {} if setting.slope.low > 0 else {"mfc": "white"}
        axis.errorbar([x], [y], [[y - low], [high - y]], [[x - left], [right - x]], **style)
    for task in tasks:
        axis.plot([], [], color=colour[task], lw=4, label=task)
    for kind, marker in zip(kinds, itertools.cycle(MARKERS), strict=False):
        axis.plot([], [], marker, color="0.3", label=kind)
    axis.set(
        xlabel="dependence of the observer's reward on what it reads, before training",
        ylabel="advantage of the chain\n(standard deviations of the reward)",
    )
    axis.set_title(
        "filled: slope above 0, better responses of the pioneer make better ones of the observer",
        fontsize=9,
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.advantage`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("file", type=str, help="The settings, a YAML file")
    parser.add_argument(
        "--out", type=str, default="advantage", help="Where the table and the figure go"
    )
    args = parser.of(argv)
    settings, out = read_settings_file(Path(args.file)), Path(args.out)
    check_results_folder(out, ("advantage.md", "advantage.png"))
    out.mkdir(parents=True, exist_ok=True)
    with staged(out) as complete:
        (complete / "advantage.md").write_text(table(settings), encoding="utf-8")
        plot(settings, complete / "advantage.png")
    print(f"{table(settings)}\nWritten to {out}")


if __name__ == "__main__":
    main(command_line)
