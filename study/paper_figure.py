"""Draws the figures of docs/paper_figure.md from results/: `python -m study.paper_figure`.

Bands and bars are 95 % intervals over seeds by Student's t, of the role that answers the query alone.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from cory.report.plots import SMOOTHING, colours
from study.equal_reward import running_means
from study.frame import RUN, Study, read_study
from study.intervals import over_seeds
from study.plots import plot_paths

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
METHODS = dict(zip(("PPO", "CORY"), colours(2), strict=True))
SETTINGS = {
    "our defaults": "",
    "eta 0.4": ", eta 0.4",
    "reward scaling and\nnormalisation": ", reward scaling",
    "learners restarted\nevery 5 iterations": ", restart",
    "all three": ", all three",
    "all three and a\nrepetition penalty": ", all three and repetition penalty",
}
TITLES = {"task_reward": "task reward", "kl": "KL to base (nats)"}


def token_reward() -> None:
    """Task reward and KL over the iterations, with the token reward of Eq. 2 and with its sampled estimate."""
    studies = {"Eq. 2": "imdb_noise_full_kl", "sampled": "imdb_noise_sampled_kl"}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for (title, source), line in zip(studies.items(), ("-", "--"), strict=True):
        study = read_study(ROOT / "results" / source)
        metrics = study.metrics[study.metrics["role"] == study.first_role]
        for method, colour in METHODS.items():
            rows = metrics[metrics["group"] == method]
            for axis, metric in zip(axes, TITLES, strict=True):
                by_seed = rows.pivot_table(index="iteration", columns="seed", values=metric)
                _band(axis, by_seed.rolling(SMOOTHING, min_periods=1).mean(), colour, line,
                      f"{method}, {title} (n = {by_seed.shape[1]})")  # fmt: skip
    for axis, title in zip(axes, TITLES.values(), strict=True):
        axis.set(title=title, xlabel="iteration")
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False, fontsize=8)
    _save(figure, "paper_figure_token_reward.png")


def settings() -> None:
    """Task reward and KL at the end of training, for each setting of the published scripts."""
    study = read_study(ROOT / "results" / "imdb_confounders")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for method, colour in METHODS.items():
        for position, name in enumerate(SETTINGS.values()):
            ends = _ends(study, method + name)
            y = position + (0.12 if method == "CORY" else -0.12)
            for axis, metric in zip(axes, TITLES, strict=True):
                interval = over_seeds(ends[metric])
                axis.errorbar(interval.value, y, xerr=interval.high - interval.value, fmt="o", color=colour, ms=5,
                              capsize=3, label=method if position == 0 else None)  # fmt: skip
    for axis, title in zip(axes, TITLES.values(), strict=True):
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="0.92")
    axes[0].set_yticks(range(len(SETTINGS)), SETTINGS, fontsize=8)
    axes[0].invert_yaxis()
    axes[1].legend(frameon=False, fontsize=9)
    _save(figure, "paper_figure_settings.png")


def paths() -> None:
    """KL over task reward on the way of the training."""
    study = read_study(ROOT / "results" / "imdb_noise_full_kl")
    plot_paths(study, FIGURES / "paper_figure_paths.png")


def _ends(study: Study, group: str) -> pd.DataFrame:
    """Task reward and KL in the last ten iterations: a row for each seed."""
    means = running_means(study, study.first_role)
    return means[means["group"] == group].groupby(RUN)[list(TITLES)].last()


def _band(axis: Any, by_seed: pd.DataFrame, colour: str, line: str, label: str) -> None:
    """The mean over seeds by iteration, with its interval."""
    rows = [over_seeds(row) for _, row in by_seed.iterrows()]
    axis.plot(by_seed.index, [row.value for row in rows], line, color=colour, lw=1.6, label=label)
    low, high = [row.low for row in rows], [row.high for row in rows]
    axis.fill_between(by_seed.index, low, high, color=colour, alpha=0.15, lw=0)


def _save(figure: Any, name: str) -> None:
    figure.savefig(FIGURES / name, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    token_reward()
    settings()
    paths()
