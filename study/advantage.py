"""Where does cooperation pay? The advantage of a chain over two calls of one model, against its observer's dependence.

    python -m study.advantage results/when/settings.yaml --out results/when

The file lists settings, each with the evaluation of its runs (`evaluate.py RUNS`, as an experiment's `evaluate` is;
with `--samples 2`, the better response of two is shown, too) and the probe of its untrained model (`observer.py
--out`):

    - label: GSM8K, toy
      evaluation: results/when/gsm8k/evaluation.json
      observer: results/when/gsm8k/observer.json
      chain: gsm8k_cory_tiny          # runs gsm8k_cory_tiny-seed0, -seed1, ...
      single: gsm8k_ppo_tiny
      order: agent_2 after agent_1    # of a pair with fixed roles; without it, the mean of both orders

Writes advantage.md, a table, and advantage.png.
"""

import itertools
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cory.cli.arguments import Arguments
from cory.cli.settings import main
from cory.errors import UserError, expect
from cory.run.output import check_results_folder, staged
from study.intervals import Interval, difference, over_seeds

KEYS = {"label", "evaluation", "observer", "chain", "single"}
ORDER = "order"  # the key that may be left out
CALLS = {"alone": "", "after itself": " after itself"}  # of one agent; the ends of rows' names
UNTRAINED = "base after itself"
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
        return Interval(apart.value / self.scale, apart.low / self.scale, apart.high / self.scale, apart.n)


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
    path = entry["evaluation"]
    try:
        rows = {row["name"]: row for row in _json(root / path)["rows"]}
        probe = _json(root / entry["observer"])
        reading, scale = probe["readings"][0], probe["spread"]
        depends, follows = (_interval(reading[key]) for key in ("dependence", "slope"))
    except (LookupError, TypeError, ValueError) as error:
        expected = "an evaluation.json and what observer.py --out has written"
        raise UserError(f"{entry['label']}: expected {expected}, got files without {error}") from None
    expect(UNTRAINED in rows, path, f"a row {UNTRAINED!r}: evaluate the runs again", list(rows))

    def of(group: str, end: str, metric: str = "combined_reward", agent: str = r"agent_\d+") -> list[float]:
        """A metric of the rows GROUP-seedN/AGENT END by seed, mean over agents."""
        form = re.compile(rf"{re.escape(group)}-seed(\d+)/{agent}{end}")
        found: dict[str, list[float]] = {}
        for name, row in rows.items():
            if match := form.fullmatch(name):
                expect(metric in row, path, f"{metric} in each row", name)
                found.setdefault(match[1], []).append(row[metric])
        return [statistics.fmean(found[seed]) for seed in sorted(found, key=int)]

    by_calls = [of(entry["single"], end) for end in CALLS.values()]
    counts = [len(values) for values in by_calls]
    expect(len(set(counts)) == 1, path, f"as many runs of {entry['single']!r} {' as '.join(CALLS)}", counts)
    one = [dict(zip(CALLS, values, strict=True)) for values in zip(*by_calls, strict=True)]
    pair = of(entry["chain"], r" after agent_\d+")
    for key, values in (("single", one), ("chain", pair)):
        expect(bool(values), key, f"the name of runs in {path}", entry[key])
    order = str(entry.get(ORDER, ""))
    known = " after " in order
    chain = of(entry["chain"], "", agent=re.escape(order)) if known else pair
    expect(
        bool(chain) and (known or not order),
        ORDER,
        f"a chain of {entry['chain']!r} in {path}, such as agent_2 after agent_1",
        order,
    )
    best = of(entry["single"], "", "best_of_2") if "best_of_2" in rows[UNTRAINED] else []
    return Setting(entry["label"], depends, follows, scale, one, rows[UNTRAINED]["combined_reward"], chain, best)


def _interval(numbers: Sequence[float | None]) -> Interval:
    """An interval of a file, where null stands for NaN: the observer's reward never varied."""
    value, low, high = (math.nan if number is None else number for number in numbers[:3])
    return Interval(value, low, high, 0)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"expected a file of results, got {str(path)!r} ({error})") from None


def table(settings: Sequence[Setting]) -> str:
    """The settings as a Markdown table."""
    from study.markdown import markdown_table

    return markdown_table(
        [
            {"setting": s.label, "n": str(len(s.chain))}
            | {"dependence": s.dependence.text(".2f"), "slope": s.slope.text(".2f")}
            | {name: _shown(values) for name, values in s.rivals().items() if not name.startswith("untrained")}
            | {"untrained, after itself": f"{s.untrained:.2f}", "chain": _shown(s.chain)}
            | {"advantage": s.advantage().text("+.2f"), "best of 2, task reward": _shown(s.best_of_2)}
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

    from cory.run.plots import colours

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
        style: dict[str, Any] = {"marker": marker, "ms": 6, "lw": 1.2, "capsize": 2, "color": colour[task or kind]}
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
        "filled: slope above 0, better responses of the pioneer make better ones of the observer", fontsize=9
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.advantage`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("file", type=str, help="The settings, a YAML file")
    parser.add_argument("--out", type=str, default="advantage", help="Where the table and the figure go")
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
