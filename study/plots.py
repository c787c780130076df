"""Draws the figures of experiments.

Bands and error bars are 95 % intervals by Student's t over seeds. A group has the same colour in all figures of a page
(`palette`).
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter, LogLocator, MaxNLocator

from cory.evaluation.plots import (
    LABEL,
    PANELS,
    UNTRAINED,
    colours_by_agents,
    plot_pass_at_k,
)
from cory.metrics import CURVES, TITLES
from cory.run.plots import LINES, add_legend, save
from cory.run.tables import natural
from study.comparison import labels, points
from study.equal_reward import common_levels, kl_at, running_means
from study.frame import BASE, LAST, Study, passes
from study.held_out import CALLS, held_out_by_seed
from study.intervals import geometric, nondominated, over_seeds

MOST_CURVES = 8  # per panel
FEWEST_IN_A_BAND = 3  # runs; the interval of two runs is so wide that it hides everything else
# Styles in small multiples: groups in which one agent learns, groups in which several do, and reference groups.
SINGLE = {"ls": "--", "marker": "D"}
SEVERAL = {"ls": "-", "marker": "o"}
GREY = {"color": "0.7", "zorder": 1}
EQUAL_GROUPS = "frac_reward_zero_std"


def palette(study: Study) -> dict[str, Any]:
    """Assigns colours to groups. The first with one learning agent has PPO's, the first with several has CORY's."""
    agents = study.without_frozen(study.final).groupby("group")["agent"].nunique()
    by_group = {name: int(agents.get(name, 0)) for name in study.groups}
    return colours_by_agents(by_group) | {BASE: UNTRAINED}


def palette_of_families(study: Study) -> dict[str, Any]:
    """Returns each family's colour, which is that of its first group."""
    first = study.runs.drop_duplicates("family")
    group_colours = palette(study)
    return {
        family: group_colours[group]
        for family, group in zip(first["family"], first["group"], strict=True)
    }


def plot_curves(study: Study, path: Path) -> None:
    """Plots task reward, KL and combined reward as in the paper's Fig. 3: mean and 95 % interval over runs.

    If every run's learner compares groups of responses, as GRPO does, a further panel shows the share of these response
    groups whose rewards are all equal.

    If runs have different lengths, the mean ends with the shortest run, because longer runs may be the better ones.
    Beyond it, each run has a thin line. With more than `MOST_CURVES` curves, each entry of `panels` gets its own row of
    panels. Every row except the first also shows the reference groups, averaged over agents, in grey.
    """
    agent_labels = labels(study)
    group_colours = palette(study)
    curves = list(CURVES)
    if EQUAL_GROUPS in study.metrics and study.metrics[EQUAL_GROUPS].notna().all():
        curves.append(EQUAL_GROUPS)
    with_metrics = set(study.metrics["group"])
    groups = [name for name in study.groups if name in with_metrics]
    if len(agent_labels) > MOST_CURVES:
        rows = panels(study, groups)
        size = (13, 0.7 + 1.7 * len(rows))
    else:
        rows = [groups]
        size = (13, 3.8)
    figure, axes = plt.subplots(
        len(rows),
        len(curves),
        figsize=size,
        layout="constrained",
        sharex=True,
        sharey="col",
        squeeze=False,
    )
    for row, names in zip(axes, rows, strict=True):
        for axis, metric in zip(row, curves, strict=True):
            for name in rows[0] if names is not rows[0] else []:
                runs = _by_iteration(study, name, None, metric)
                means = _smooth(runs).loc[: _shortest(runs)].mean(axis=1)
                line = "-" if _style(study, name) is SINGLE else ":"
                axis.plot(means, lw=1.6, label=f"{name}, as above", **{**GREY, "ls": line})
            for name in names:
                for position, agent in enumerate(_agents(study, name)):
                    style = {"color": group_colours[name], "ls": LINES[position % len(LINES)]}
                    runs = _by_iteration(study, name, agent, metric)
                    _curve(axis, runs, agent_labels.get((name, agent), name), style)
            axis.margins(x=0.01)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            _without_frame(axis)
        if len(rows) > 1:
            handles, texts = row[0].get_legend_handles_labels()
            row[-1].legend(handles, [textwrap.fill(text, LABEL) for text in texts],
                           loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)  # fmt: skip
    for axis, metric in zip(axes[0], curves, strict=True):
        axis.set_title(TITLES[metric], fontsize=10)
    if len(rows) == 1:
        for axis in axes[0]:
            axis.set_xlabel("iteration")
        add_legend(figure, axes[0, 0])
    else:
        figure.supxlabel("iteration", fontsize=9)
    save(figure, path)


def _agents(study: Study, name: str) -> list[str]:
    """Returns a group's agents, in order."""
    return natural(study.metrics.loc[study.metrics["group"] == name, "agent"].unique())


def _by_iteration(study: Study, name: str, agent: str | None, metric: str) -> pd.DataFrame:
    """Returns a metric of one agent, or averaged over all agents: a row per iteration (from 1), a column per seed."""
    rows = study.metrics[study.metrics["group"] == name]
    if agent is not None:
        rows = rows[rows["agent"] == agent]
    runs = rows.groupby(["iteration", "seed"])[metric].mean().unstack("seed")
    runs.index += 1
    return runs


def _smooth(runs: pd.DataFrame) -> pd.DataFrame:
    return runs.rolling(LAST, min_periods=1).mean().where(runs.notna())


def _shortest(runs: pd.DataFrame) -> int:
    """Returns the last iteration of the shortest run."""
    return min(int(values.last_valid_index()) for _, values in runs.items())


def _curve(axis: Axes, runs: pd.DataFrame, label: str, style: Mapping[str, Any]) -> None:
    """Draws the mean over runs, with its interval if there are at least three runs.

    After the end of the shortest run, each run has its own line.
    """
    shortest = _shortest(runs)
    smooth = _smooth(runs)
    common = smooth.loc[:shortest]
    bands = pd.DataFrame(
        [over_seeds(row.dropna()) for _, row in common.iterrows()], index=common.index
    )
    for _, values in smooth.loc[shortest:].items():
        if values.count() > 1:
            axis.plot(values.dropna(), lw=0.7, alpha=0.7, **style)
    axis.plot(bands["value"], lw=1.6, label=f"{label} (n = {runs.shape[1]})", **style)
    if runs.shape[1] >= FEWEST_IN_A_BAND:
        axis.fill_between(
            bands.index, bands["low"], bands["high"], color=style["color"], alpha=0.15, lw=0
        )


def plot_paths(study: Study, path: Path, role: str) -> None:
    """Plots a role's KL over its task reward during training.

    Lines show the geometric mean of the KL where the task reward first reaches a level, up to the last level that 90 %
    of the runs reach. Where the lines of two groups coincide, the groups have the same KL at the same task reward.
    Markers show the end of training. The first panel's groups are grey in the other panels (`panels`).
    """
    means = running_means(study, role)
    group_colours = palette(study)
    first, *others = panels(study, [name for name in study.groups if name in set(means["group"])])
    down = math.ceil((1 + len(others)) / PANELS)
    across = math.ceil((1 + len(others)) / down)
    figure, axes = plt.subplots(
        down, across, figsize=(0.6 + 3.2 * across, 0.6 + 2.7 * down), layout="constrained",
        sharex=True, sharey=True, squeeze=False,
    )  # fmt: skip
    for axis in axes.flat[1 + len(others) :]:
        axis.remove()
    for axis, names in zip(axes.flat, [first, *others], strict=False):
        for name in first if names is not first else []:
            _path(axis, means[means["group"] == name], "", _style(study, name) | GREY)
        for name in names:
            group_means = means[means["group"] == name]
            label = textwrap.fill(f"{name} (n = {group_means['seed'].nunique()})", LABEL)
            _path(axis, group_means, label, {"color": group_colours[name], **_style(study, name)})
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(0.4, 0.4)))
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8,
                    handlelength=1.7, borderaxespad=0)  # fmt: skip
        _without_frame(axis)
    # A column's lowest panel may lie above an empty cell, so its tick labels are switched on.
    for axis in figure.axes[-across:]:
        axis.tick_params(labelbottom=True)
    grey = "; grey: as in the first panel" if others else ""
    figure.supxlabel(f"task reward of the {role} (marker: end of training{grey})", fontsize=9)
    figure.supylabel(f"{TITLES['kl']}, log scale", fontsize=9)
    save(figure, path)


def panels(study: Study, names: Sequence[str]) -> list[list[str]]:
    """Arranges groups in small multiples; the first panel has the reference groups.

    There are two references: the first group with one learning agent, and the first with several. The baseline is
    always one of them. Each further panel has the groups of one setting, such as `PPO, restart` and `CORY, restart`.
    """
    baselines = set(study.runs.loc[study.runs["baseline"], "group"])
    references: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name not in baselines):
        references.setdefault(_style(study, name)["ls"], name)
    families = study.runs.drop_duplicates("group").set_index("group")["family"]
    methods = {families[name] for name in references.values()}
    by_setting: dict[str, list[str]] = {}
    for name in names:
        method, _, setting = name.partition(", ")
        if name not in references.values():
            by_setting.setdefault(setting if method in methods else name, []).append(name)
    return [[name for name in names if name in references.values()], *by_setting.values()]


def _path(axis: Axes, means: pd.DataFrame, label: str, style: Mapping[str, Any]) -> None:
    """Draws a group's line of `plot_paths`, and a marker at the end of training."""
    levels = common_levels(means, step=0.05)
    kls = [geometric(kl_at(means, level)).value for level in levels]
    axis.plot(levels, kls, lw=1.6, label=label, **{**style, "marker": ""})
    ends = means.groupby("seed")[["task_reward", "kl"]].last()
    axis.plot(ends["task_reward"].mean(), geometric(ends["kl"]).value, ms=6, **style)


def _style(study: Study, name: str) -> dict[str, Any]:
    """Returns a group's style in small multiples, by whether one agent learns or several."""
    final = study.without_frozen(study.final)
    rows = final[final["group"] == name]
    return SINGLE if rows["agent"].nunique() == 1 else SEVERAL


def plot_held_out_passes(study: Study, path: Path) -> None:
    """Plots pass@k on held-out queries by group, in one call and in two (`plot_pass_at_k`)."""
    ks = passes(study)
    rows = _held_out_means(study, [f"pass@{k}" for k in ks])
    group_colours = palette(study)
    plot_pass_at_k(rows, ks, path, [group_colours[row["group"]] for row in rows], "seeds")


def _held_out_means(study: Study, metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Averages metrics over seeds: a row per group and number of calls. `METRIC_ci` is the interval's half-width."""
    rows = []
    for name in [BASE, *study.groups]:
        for calls, title in CALLS.items():
            row: dict[str, Any] = {"group": name, "name": f"{name}, {title}"}
            for metric in metrics:
                by_seed = held_out_by_seed(study, metric, calls)
                if name in by_seed:
                    interval = over_seeds(by_seed[name].dropna())
                    row |= {metric: interval.value, f"{metric}_ci": interval.high - interval.value}
            if len(row) > 2:
                rows.append(row)
    return rows


def plot_frontier(study: Study, path: Path) -> None:
    """Plots task reward and KL with a point per value of a key (paper, Fig. 2c); lines join nondominated points."""
    runs = points(study)
    runs["kl"] = -runs["kl"]
    family_colours = palette_of_families(study)
    figure, axis = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    for family, colour in family_colours.items():
        family_runs = runs[runs["family"] == family]
        by_value = family_runs.groupby("value", sort=False)[["task_reward", "kl"]].agg(over_seeds)
        rewards, kls = by_value["task_reward"], by_value["kl"]
        means = [(reward.value, kl.value) for reward, kl in zip(rewards, kls, strict=True)]
        axis.errorbar(
            [x for x, _ in means], [y for _, y in means], [kl.high - kl.value for kl in kls],
            [reward.high - reward.value for reward in rewards],
            fmt="o", color=colour, ms=5, lw=0.9, capsize=2,
        )  # fmt: skip
        best = sorted(means[i] for i in nondominated(means))
        axis.plot([x for x, _ in best], [y for _, y in best], color=colour, lw=1.4, label=family)
        for value, mean in zip(by_value.index, means, strict=True):
            axis.annotate(
                value, mean, textcoords="offset points", xytext=(5, 4), fontsize=7, color=colour
            )
    axis.set(
        xlabel=TITLES["task_reward"], ylabel=f"-{TITLES['kl']}", title=f"frontier over {study.over}"
    )
    _without_frame(axis)
    axis.legend(frameon=False, fontsize=9)
    save(figure, path)


def _without_frame(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
