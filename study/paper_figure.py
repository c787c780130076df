"""Draws the figures of docs/paper_figure.md from results/: `python -m study.paper_figure`.

Values are of the role that answers the query alone, KLs are geometric means, bands and bars 95 % intervals over seeds.
"""

from bisect import bisect
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from cory.config import SamplingConfig
from cory.report.plots import colours
from cory.streams import response_limit
from study.equal_reward import running_means
from study.frame import RUN, Study, read_study
from study.intervals import Interval, geometric, over_seeds
from study.plots import save

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
METHODS = dict(zip(("PPO", "CORY"), colours(2), strict=True))
MEANS: dict[str, Callable[[pd.Series], Interval]] = {"task_reward": over_seeds, "kl": geometric}
TITLES = {"task_reward": "task reward", "kl": "KL to base (nats)"}
TOKEN_REWARDS = {"imdb_noise_full_kl": ("Eq. 2", "-"), "imdb_noise_sampled_kl": ("sampled", "--")}
SETTINGS = {
    "ours, for both": "",
    "eta 0.4": ", eta 0.4",
    "reward scaling and\nnormalisation": ", reward scaling",
    "learners restarted\nevery 5 iterations": ", restart",
    "all three": ", all three",
    "all three and a\nrepetition penalty": ", all three and repetition penalty",
}
# Groups of the figure of lengths, and its bins of limits in tokens, first and last.
LENGTHS = (
    "PPO",
    "CORY",
    "CORY, all three",
    "PPO, half the learning rate",
    "PPO, sampled KL",
)
LIMITS = ((4, 6), (7, 9), (10, 12), (13, 16))
LAST_ITERATIONS = 30  # so that each run has iterations in each bin


def token_reward(path: Path) -> None:
    """Task reward and KL over the iterations, with the token reward of Eq. 2 and with its sampled estimate."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for source, (title, line) in TOKEN_REWARDS.items():
        study = read_study(ROOT / "results" / source)
        means = running_means(study, study.first_role)
        means["iteration"] = 10 + means.groupby(RUN).cumcount()
        for method, colour in METHODS.items():
            of_method = means[means["group"] == method]
            label = f"{method}, {title} (n = {of_method['seed'].nunique()})"
            for axis, metric in zip(axes, TITLES, strict=True):
                _band(axis, of_method, metric, colour, line, label)
    for axis, title in zip(axes, TITLES.values(), strict=True):
        axis.set(title=title, xlabel="iteration")
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_yscale("log")
    axes[1].yaxis.set_major_formatter("{x:g}")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  frameon=False, fontsize=8)  # fmt: skip
    save(figure, path)


def _band(axis: Axes, means: pd.DataFrame, metric: str, colour: str, line: str, label: str) -> None:
    """The mean over seeds by iteration, with its interval."""
    by_iteration = [MEANS[metric](rows[metric]) for _, rows in means.groupby("iteration")]
    iterations = sorted(means["iteration"].unique())
    axis.plot(
        iterations, [mean.value for mean in by_iteration], line, color=colour, lw=1.6, label=label
    )
    low = [mean.low for mean in by_iteration]
    high = [mean.high for mean in by_iteration]
    axis.fill_between(iterations, low, high, color=colour, alpha=0.15, lw=0)


def settings(path: Path) -> None:
    """Task reward and KL at the end of training, for each setting of the published scripts."""
    study = read_study(ROOT / "results" / "imdb_confounders")
    ends = running_means(study, study.first_role).groupby(RUN).last()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for method, colour in METHODS.items():
        for position, name in enumerate(SETTINGS.values()):
            of_group = ends.loc[method + name]
            y = position + (0.12 if method == "CORY" else -0.12)
            for axis, metric in zip(axes, TITLES, strict=True):
                mean = MEANS[metric](of_group[metric])
                label = f"{method} (n = {mean.n})" if position == 0 else None
                axis.plot(mean.value, y, "o", color=colour, ms=5, label=label)
                axis.plot([mean.low, mean.high], [y, y], color=colour, lw=1.5)
    for axis, title in zip(axes, TITLES.values(), strict=True):
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="0.92")
    axes[0].set_yticks(range(len(SETTINGS)), list(SETTINGS), fontsize=8)
    axes[0].invert_yaxis()
    axes[1].set_xscale("log")
    axes[1].set_xticks([2, 5, 10, 20, 50], labels=["2", "5", "10", "20", "50"], minor=False)
    axes[1].xaxis.set_minor_formatter(NullFormatter())
    axes[1].set_xlim(2, 50)
    figure.legend(
        *axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    save(figure, path)


def lengths(path: Path) -> None:
    """Task reward and length at the end of training, over the limit of tokens that is drawn for each iteration."""
    study = read_study(ROOT / "results" / "imdb_cures")
    by_limit = rewards_by_limit(study)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    titles = {"task_reward": "task reward", "response_tokens": "tokens of a response"}
    for name, colour in zip(LENGTHS, colours(len(LENGTHS)), strict=True):
        rows = by_limit.loc[name]
        label = f"{name} (n = {rows.index.get_level_values('seed').nunique()})"
        for axis, metric in zip(axes, titles, strict=True):
            means = [over_seeds(rows.loc[limit, metric]) for limit in range(len(LIMITS))]
            bars = [mean.high - mean.value for mean in means]
            axis.errorbar(range(len(LIMITS)), [mean.value for mean in means], bars, color=colour,
                          marker="o", ms=4, lw=1.6, capsize=2, label=label)  # fmt: skip
    for axis, title in zip(axes, titles.values(), strict=True):
        axis.set(title=title, xlabel="limit of the iteration (tokens)")
        axis.set_xticks(range(len(LIMITS)), [f"{first} to {last}" for first, last in LIMITS])
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  frameon=False, fontsize=8)  # fmt: skip
    save(figure, path)


def rewards_by_limit(study: Study) -> pd.DataFrame:
    """Task reward and response tokens by group, bin of `LIMITS` and seed: means over a run's last iterations."""
    metrics = study.metrics
    rows = metrics[
        (metrics["role"] == study.first_role)
        & (metrics["iteration"] >= metrics["iteration"].max() + 1 - LAST_ITERATIONS)
    ]
    sampling = SamplingConfig()  # the toy setting has the limits of the defaults
    limits = [
        response_limit(int(seed), int(k), sampling.min_new_tokens, sampling.max_new_tokens)
        for seed, k in zip(rows["seed"], rows["iteration"], strict=True)
    ]
    firsts = [first for first, _ in LIMITS]
    rows = rows.assign(limit=[bisect(firsts, limit) - 1 for limit in limits])
    return rows.groupby(["group", "limit", "seed"])[["task_reward", "response_tokens"]].mean()


if __name__ == "__main__":
    token_reward(FIGURES / "paper_figure_token_reward.png")
    settings(FIGURES / "paper_figure_settings.png")
    lengths(FIGURES / "paper_figure_lengths.png")
