"""Where does cooperation pay? The advantage of a chain of two agents over two calls of one, over what a reader reads.

    python -m study.advantage results/when/settings.yaml --out results/when

The file lists settings, each with the evaluation of its runs (an experiment's `evaluate`, with two samples) and the
reading of its untrained model (`observer.py --out`):

    - label: GSM8K, toy
      evaluation: results/gsm8k_credit/evaluation.json
      observer: results/when/gsm8k.json
      chain: gsm8k_cory_tiny          # runs gsm8k_cory_tiny-seed0, -seed1, ...
      single: gsm8k_ppo_tiny

Writes advantage.md, a table, and advantage.png.
"""

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cory.config import UserError, expect
from cory.run.arguments import Arguments
from cory.run.settings import main
from study.statistics import Interval, bootstrap, with_interval

KEYS = {"label", "evaluation", "observer", "chain", "single"}
CALLS = {"alone": "", "after itself": " after itself", "best of 2": ", best of 2"}  # of one agent; ends of rows' names
UNTRAINED = "untrained, after itself"
Rewards = dict[str, list[float]]  # combined reward by seed


@dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        dependence, slope: of the untrained observer's reward on what it reads (docs/metrics.md).
        scale: standard deviation of the untrained pioneer's task reward.
        one: combined rewards of one agent by CALLS, a value for each seed, and that of UNTRAINED.
        chain: those of the pair, mean of both orders.
    """

    label: str
    dependence: Interval
    slope: Interval
    scale: float
    one: Rewards
    chain: list[float]

    def best(self) -> str:
        """Which two calls of one model, or one, do best without a reward at inference."""
        return max(("alone", "after itself", UNTRAINED), key=lambda calls: statistics.fmean(self.one[calls]))

    def advantage(self) -> Interval:
        """Of the chain over `best`, in units of `scale`, with a bootstrap over the seeds of both."""

        def difference(chain: Sequence[float], one: Sequence[float]) -> float:
            return (statistics.fmean(chain) - statistics.fmean(one)) / self.scale

        one = self.one[self.best()]
        if len(one) == 1:  # the untrained model has no seeds
            return bootstrap(lambda chain: difference(chain, one), self.chain)
        return bootstrap(difference, self.chain, one)


def read_settings_file(path: Path) -> list[Setting]:
    """The settings that a file lists; paths in it are relative to the current folder. Raises a UserError over them."""
    try:
        listed = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"expected a list of settings, got {str(path)!r} ({error})") from None
    expect(isinstance(listed, list) and bool(listed), str(path), "a list of settings", listed)
    for number, entry in enumerate(listed):
        ok = isinstance(entry, dict) and set(entry) == KEYS
        expect(ok, f"{path}, setting {number + 1}", f"the keys {', '.join(sorted(KEYS))}", entry)
    return [_setting(entry) for entry in listed]


def _setting(entry: dict[str, Any]) -> Setting:
    rows = _json(entry["evaluation"])["rows"]
    probe = _json(entry["observer"])

    def of(group: str, end: str) -> list[list[float]]:
        """Combined rewards of the rows GROUP-seedN/agent_X END, by seed."""
        form = re.compile(rf"{re.escape(group)}-seed(\d+)/agent_\d+{end}")
        found: dict[str, list[float]] = {}
        for row in rows:
            if match := form.fullmatch(row["name"]):
                found.setdefault(match[1], []).append(row["combined_reward"])
        return list(found.values())

    single = {calls: [values[0] for values in of(entry["single"], re.escape(end))] for calls, end in CALLS.items()}
    chain = [statistics.fmean(values) for values in of(entry["chain"], r" after agent_\d+")]
    for name, values in (("single", single["alone"]), ("single", single["after itself"]), ("chain", chain)):
        expect(bool(values), name, f"the name of runs in {entry['evaluation']}", entry[name])
    untrained = [row["combined_reward"] for row in rows if row["name"] == "base after itself"]
    single[UNTRAINED] = untrained or [-math.inf]
    reading = probe["readings"][0]
    return Setting(
        entry["label"], tuple(reading["dependence"]), tuple(reading["slope"]), probe["spread"], single, chain
    )


def _json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"expected a file of results, got {path!r} ({error})") from None


def table(settings: Sequence[Setting]) -> str:
    """The settings as a Markdown table."""
    from study.tables import markdown_table

    def shown(values: Sequence[float]) -> str:
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.2f}{spread}" if values else ""

    return markdown_table(
        [
            {"setting": s.label, "n": str(len(s.chain))}
            | {"dependence": with_interval(s.dependence, ".2f"), "slope": with_interval(s.slope, ".2f")}
            | {f"one agent, {calls}": shown(s.one[calls]) for calls in CALLS}
            | {UNTRAINED: shown([x for x in s.one[UNTRAINED] if math.isfinite(x)]), "chain": shown(s.chain)}
            | {"advantage": with_interval(s.advantage(), "+.2f")}
            for s in settings
        ]
    )


def plot(settings: Sequence[Setting], path: Path) -> None:
    """Advantage over dependence, both with their 95 % intervals; filled where the slope is above 0."""
    import matplotlib.pyplot as plt

    from cory.run.plots import colours

    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    axis.axhline(0, color="0.3", lw=0.8)
    for setting, colour in zip(settings, colours(len(settings)), strict=True):
        (x, left, right), (y, low, high) = setting.dependence, setting.advantage()
        style: dict[str, Any] = {"marker": "o", "ms": 6, "lw": 1.2, "capsize": 2, "color": colour}
        style |= {} if setting.slope[1] > 0 else {"mfc": "white"}
        axis.errorbar([x], [y], [[y - low], [high - y]], [[x - left], [right - x]], label=setting.label, **style)
    axis.set(
        title="filled: what earns the pioneer more earns its reader more",
        xlabel="dependence of the observer's reward on what it reads, before training",
        ylabel="advantage of the chain\n(standard deviations of the reward)",
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.advantage`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("file", type=str, help="The settings, a YAML file")
    parser.add_argument("--out", type=str, default="advantage", help="Where the table and the figure go")
    args = parser.of(argv)
    settings, out = read_settings_file(Path(args.file)), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "advantage.md").write_text(table(settings), encoding="utf-8")
    plot(settings, out / "advantage.png")
    print(f"{table(settings)}\nWritten to {out}")


if __name__ == "__main__":
    main(command_line)
