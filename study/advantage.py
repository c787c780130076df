"""Where does cooperation pay? The advantage of a chain over its rivals, against the slope of its observer.

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
from cory.cli.yaml_file import read_yaml
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
        listed = read_yaml(path)
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
    for key in ("single", "chain", BOTH_ROLES):
        if key in entry and entry[key] not in set(held_out["group"]):
            groups = sorted(set(held_out["group"]) - {BASE})
            raise UserError(f"{label}, {key}: expected one of {groups}, got {entry[key]!r}")

    dependence, slope, scale = _probe(label, root, entry["observer"])
    single = held_out[held_out["group"] == entry["single"]]
    trained = {
        name: _by_seed(single[single["calls"] == calls], "combined_reward")
        for name, calls in CALLS.items()
    }
    untrained = held_out[(held_out["group"] == BASE) & (held_out["calls"] == 2)]
    if not all(map(len, trained.values())) or not len(untrained):
        raise UserError(
            f"{label}: expected {entry['single']!r} and the base after themselves, got no such rows"
        )
    if BOTH_ROLES in entry:
        trained[ONE_LLM] = _one_llm(label, held_out, entry[BOTH_ROLES])
    return Setting(
        label=label,
        dependence=dependence,
        slope=slope,
        scale=scale,
        chain=_chain(label, held_out, entry["chain"], entry.get(ORDER)),
        trained=trained,
        untrained=float(untrained["combined_reward"].iloc[0]),
        choices=_choices(single[single["calls"] == 1]),
    )


def _probe(label: str, root: Path, file: str) -> tuple[Interval, Interval, float]:
    """The dependence and the slope of the untrained observer, and the standard deviation of the pioneer's reward."""
    try:
        probe = json.loads((root / file).read_text(encoding="utf-8"))
        reading = probe["readings"][0]
        return _interval(reading["dependence"]), _interval(reading["slope"]), float(probe["spread"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        expected = "what observer.py --out has written"
        raise UserError(f"{label}: expected {expected}, got {file!r} ({error})") from None


def _by_seed(rows: "pd.DataFrame", metric: str) -> BySeed:
    """A metric by seed, mean over agents or orders."""
    return rows.groupby("seed")[metric].mean().dropna()


def _chain(label: str, held_out: "pd.DataFrame", group: str, order: str | None) -> BySeed:
    """The combined rewards of a pair in two calls: mean of both orders, or of the order named."""
    of_pair = held_out[held_out["group"] == group]
    in_order = of_pair["answers"] == order if order else of_pair["calls"] == 2
    chain = _by_seed(of_pair[in_order], "combined_reward")
    if not len(chain):
        raise UserError(
            f"{label}, {ORDER}: expected a chain of {group!r}, such as agent_2 after agent_1, got {order!r}"
        )
    return chain


def _one_llm(label: str, held_out: "pd.DataFrame", group: str) -> BySeed:
    """The combined rewards of one LLM that was trained in both roles, after itself."""
    # A pair also has rows of two calls, of one agent after the other.
    after_itself = held_out["answers"] == "agent_1 after itself"
    one_llm = _by_seed(held_out[(held_out["group"] == group) & after_itself], "combined_reward")
    if not len(one_llm):
        raise UserError(
            f"{label}, {BOTH_ROLES}: expected a group of one agent that answers after itself, got {group!r}"
        )
    return one_llm


def _choices(solo: "pd.DataFrame") -> dict[str, BySeed]:
    """The better of two responses of one agent, and its largest vote, as far as the evaluation has them."""
    choices = {}
    if "best_of_2" in solo:
        choices["best of 2"] = _by_seed(solo, "best_of_2")
    votes = [int(key.removeprefix("maj@")) for key in solo if key.startswith("maj@")]
    if votes:
        choices[f"vote of {max(votes)}"] = _by_seed(solo, f"maj@{max(votes)}")
    return choices


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
    """Both advantages over the slope, with their 95 % intervals.

    What stands before the last comma of a label has a colour, what stands after it a marker.
    """
    import matplotlib.pyplot as plt

    from cory.report.plots import colours
    from study.plots import save

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout="constrained")
    panels = {
        "over rivals of one role": Setting.advantage_over_one_role,
        "over all rivals, with one LLM in both roles where it was trained": Setting.advantage,
    }
    parts = [setting.label.rpartition(", ") for setting in settings]
    tasks = list(dict.fromkeys(task or kind for task, _, kind in parts))
    kinds = list(dict.fromkeys(kind for task, _, kind in parts if task))
    colour = dict(zip(tasks, colours(len(tasks)), strict=True))
    for axis, (title, advantage) in zip(axes, panels.items(), strict=True):
        axis.axhline(0, color="0.3", lw=0.8)
        axis.axvline(0, color="0.8", lw=0.8, zorder=0)
        for setting, (task, _, kind) in zip(settings, parts, strict=True):
            x, left, right, *_ = setting.slope
            y, low, high, *_ = advantage(setting)
            axis.errorbar(
                [x], [y], [[y - low], [high - y]], [[x - left], [right - x]],
                marker=MARKERS[kinds.index(kind) % len(MARKERS)] if task else MARKERS[0],
                ms=6, lw=1.2, capsize=2, color=colour[task or kind],
            )  # fmt: skip
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    for task in tasks:
        axes[1].plot([], [], color=colour[task], lw=4, label=task)
    for kind, marker in zip(kinds, itertools.cycle(MARKERS), strict=False):
        axes[1].plot([], [], marker, color="0.3", label=kind)
    axes[0].set_ylabel("advantage of the chain\n(standard deviations of the reward)")
    figure.supxlabel(
        "slope before training: what the observer earns more after a response that has earned 1 more",
        fontsize=9,
    )
    axes[1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


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
