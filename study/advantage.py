"""Where does cooperation pay? The advantage of a chain over two calls of one model, against its observer's dependence.

    python -m study.advantage results/when/settings.yaml --out results/when

The file lists settings, each with a folder of results (those of `study.experiment`, whose held_out.csv it reads) and
the probe of its untrained model (`observer.py --out`):

    - label: GSM8K, toy
      results: results/gsm8k_credit
      observer: results/when/gsm8k/observer.json
      chain: collective                     # the name of a group
      single: PPO
      both_roles: one LLM in both roles     # may be left out: one more rival
      order: agent_2 after agent_1          # of a pair with fixed roles; without it, the mean of both orders

Writes advantage.md, a table, and advantage.png. The table also shows the better of two responses of `single` where the
evaluation had `--samples 2` or more, and a vote of them where it had `--ks` and the task extracts answers.
"""

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from cory.cli.arguments import Arguments
from cory.cli.main import main
from cory.errors import UserError, expect
from cory.run.output import check_results_folder, staged
from study.intervals import Interval, difference, over_seeds

if TYPE_CHECKING:
    import pandas as pd

KEYS = {"label", "results", "observer", "chain", "single"}
# Keys that may be left out.
BOTH_ROLES = "both_roles"
ORDER = "order"
CALLS = {"one agent, alone": 1, "one agent, after itself": 2}
ONE_LLM = "one LLM in both roles"
UNTRAINED = "untrained, after itself"
MARKERS = "os^Dv"
BySeed: TypeAlias = "pd.Series[float]"  # indexed by seed


@dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        dependence, slope: of the untrained observer's reward on what it reads (docs/metrics.md).
        scale: standard deviation of the untrained pioneer's task reward.
        chain: combined rewards of the pair, mean of both orders, or in the order named.
        trained: by name, the combined rewards of the trained models that the chain is compared with.
        untrained: combined reward of the base after itself.
        choices: by name, task rewards of one agent's responses that are chosen among several: by
            the reward itself, or by a vote. Only those that the evaluation has.
    """

    label: str
    dependence: Interval
    slope: Interval
    scale: float
    chain: BySeed
    trained: dict[str, BySeed]
    untrained: float
    choices: dict[str, BySeed]

    def rivals(self) -> dict[str, BySeed]:
        """The combined rewards of what the chain is compared with, by name."""
        return self.trained | {UNTRAINED: 0 * self.chain + self.untrained}

    def best_rival(self) -> str:
        """The rival with the highest mean."""
        return _best(self.rivals())

    def advantage(self) -> Interval:
        """Of the chain over the best rival, in units of `scale`, by Student's t over seeds."""
        return self._over_best(self.rivals())

    def advantage_over_one_role(self) -> Interval:
        """The same without the rival that was trained in both roles: what two roles bring, also to one LLM."""
        rivals = self.rivals()
        rivals.pop(ONE_LLM, None)
        return self._over_best(rivals)

    def _over_best(self, rivals: dict[str, BySeed]) -> Interval:
        apart = difference(self.chain, rivals[_best(rivals)])
        return Interval(
            apart.value / self.scale, apart.low / self.scale, apart.high / self.scale, apart.n
        )


def _best(rivals: dict[str, BySeed]) -> str:
    return max(rivals, key=lambda name: statistics.fmean(rivals[name]))


def read_settings_file(path: Path, root: Path = Path()) -> list[Setting]:
    """The settings that a file lists; paths are relative to `root`. Raises a UserError on bad ones."""
    try:
        listed = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"expected a list of settings, got {str(path)!r} ({error})") from None
    expect(isinstance(listed, list) and bool(listed), str(path), "a list of settings", listed)
    for number, entry in enumerate(listed):
        ok = isinstance(entry, dict) and set(entry) - {BOTH_ROLES, ORDER} == KEYS
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

    def by_seed(group: str, metric: str, **chosen: str | int) -> BySeed:
        """A metric of a group's rows with some values, mean over agents or orders."""
        rows = held_out[held_out["group"] == group]
        for key, value in chosen.items():
            rows = rows[rows[key] == value]
        return rows.groupby("seed")[metric].mean().dropna()

    for key in ("single", "chain", BOTH_ROLES):
        if key in entry and entry[key] not in set(held_out["group"]):
            groups = sorted(set(held_out["group"]) - {BASE})
            raise UserError(f"{label}, {key}: expected one of {groups}, got {entry[key]!r}")

    order = entry.get(ORDER)
    chosen = {"answers": order} if order else {"calls": 2}
    chain = by_seed(entry["chain"], "combined_reward", **chosen)
    if not len(chain):
        raise UserError(
            f"{label}, {ORDER}: expected a chain of {entry['chain']!r}, such as agent_2 after agent_1, got {order!r}"
        )

    trained = {
        name: by_seed(entry["single"], "combined_reward", calls=calls)
        for name, calls in CALLS.items()
    }
    untrained = held_out[(held_out["group"] == BASE) & (held_out["calls"] == 2)]
    if not all(map(len, trained.values())) or not len(untrained):
        raise UserError(
            f"{label}: expected {entry['single']!r} and the base after themselves, got no such rows"
        )
    if BOTH_ROLES in entry:
        # A pair also has rows of two calls, of one agent after the other.
        trained[ONE_LLM] = by_seed(
            entry[BOTH_ROLES], "combined_reward", answers="agent_1 after itself"
        )
        if not len(trained[ONE_LLM]):
            raise UserError(
                f"{label}, {BOTH_ROLES}: expected a group of one agent that answers after itself, "
                f"got {entry[BOTH_ROLES]!r}"
            )

    choices = {}
    if "best_of_2" in held_out:
        choices["best of 2"] = by_seed(entry["single"], "best_of_2", calls=1)
    votes = [int(key.removeprefix("maj@")) for key in held_out if key.startswith("maj@")]
    if votes:
        most = max(votes)
        choices[f"vote of {most}"] = by_seed(entry["single"], f"maj@{most}", calls=1)

    base = float(untrained["combined_reward"].iloc[0])
    return Setting(label, dependence, slope, scale, chain, trained, base, choices)


def _interval(numbers: Sequence[float | None]) -> Interval:
    """An interval of a file, where null stands for NaN: the observer's reward never varied."""
    value, low, high = (math.nan if number is None else number for number in numbers[:3])
    return Interval(value, low, high, 0)


def table(settings: Sequence[Setting]) -> str:
    """The settings as a Markdown table.

    A cell is empty where a setting lacks what another has.
    """
    from study.markdown import markdown_table

    trained = dict.fromkeys(name for s in settings for name in s.trained)
    choices = dict.fromkeys(name for s in settings for name in s.choices)
    return markdown_table(
        [
            {"setting": s.label, "n": str(s.advantage().n)}
            | {"dependence": s.dependence.text(".2f"), "slope": s.slope.text(".2f")}
            | {name: _shown(s.trained.get(name)) for name in trained}
            | {UNTRAINED: f"{s.untrained:.2f}", "chain": _shown(s.chain)}
            | _advantages(s)
            | {f"{name}, task reward": _shown(s.choices.get(name)) for name in choices}
            for s in settings
        ]
    )


def _shown(values: "BySeed | None") -> str:
    return "" if values is None else over_seeds(values).plus_minus()


def short_rows(settings: Sequence[Setting]) -> list[dict[str, str]]:
    """The settings as rows of a short table: dependence, slope, the best rival, the chain, and its advantage."""
    return [
        {
            "setting": s.label,
            "n": str(s.advantage().n),
            "dependence": f"{s.dependence.value:.2f}",
            "slope": f"{s.slope.value:.2f}",
            "best rival": f"{statistics.fmean(s.rivals()[s.best_rival()]):.2f} {s.best_rival()}",
            "chain": f"{statistics.fmean(s.chain):.2f}",
        }
        | _advantages(s)
        for s in settings
    ]


def _advantages(setting: Setting) -> dict[str, str]:
    return {
        "advantage": setting.advantage().text("+.2f"),
        "over rivals of one role": setting.advantage_over_one_role().text("+.2f"),
    }


def plot(settings: Sequence[Setting], path: Path) -> None:
    """Both advantages over dependence, with their 95 % intervals. Filled: the interval of the slope is above 0.

    What stands before the last comma of a label has a colour, what stands after it a marker.
    """
    import matplotlib.pyplot as plt

    from cory.report.plots import colours

    figure, axes = plt.subplots(1, 2, figsize=(11.5, 4.6), sharey=True, layout="constrained")
    panels = {
        "over rivals of one role": Setting.advantage_over_one_role,
        "over all rivals, one LLM in both roles among them": Setting.advantage,
    }
    parts = [setting.label.rpartition(", ") for setting in settings]
    tasks = list(dict.fromkeys(task or kind for task, _, kind in parts))
    kinds = list(dict.fromkeys(kind for task, _, kind in parts if task))
    colour = dict(zip(tasks, colours(len(tasks)), strict=True))
    for axis, (title, advantage) in zip(axes, panels.items(), strict=True):
        axis.axhline(0, color="0.3", lw=0.8)
        for setting, (task, _, kind) in zip(settings, parts, strict=True):
            x, left, right, _ = setting.dependence
            y, low, high, _ = advantage(setting)
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
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    for task in tasks:
        axes[1].plot([], [], color=colour[task], lw=4, label=task)
    for kind, marker in zip(kinds, itertools.cycle(MARKERS), strict=False):
        axes[1].plot([], [], marker, color="0.3", label=kind)
    axes[0].set_ylabel("advantage of the chain\n(standard deviations of the reward)")
    figure.supxlabel(
        "dependence of the observer's reward on what it reads, before training\n"
        "(filled: slope above 0, better responses of the pioneer make better ones of the observer)",
        fontsize=9,
    )
    axes[1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
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
