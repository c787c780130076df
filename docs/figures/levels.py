"""Draws the ratio of CORY's KL to PPO's as a function of task reward, from the files under results/. Writes levels.png.

python docs/figures/levels.py
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[0] = str(ROOT)

import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from study.equal_reward import ANY, SHARE, kls_at_level  # noqa: E402
from study.frame import Study, read_study  # noqa: E402
from study.intervals import ratio  # noqa: E402

plt.rcParams.update({"font.size": 11, "font.family": "sans-serif"})
ROLES = {"observer": "#1f6fb4", "pioneer": "#c1440e", ANY: "#333333"}
NAMES = {"observer": "as observer", "pioneer": "as pioneer", ANY: "both roles"}
MARGIN = 0.2  # levels start this far above the initial task reward, as ratios of tiny KLs are noise
# The untaught toy was not trained in the observer's prompt form.
PANELS = {
    "toy, 20 seeds": "imdb_partner_sampled_kl",
    "untaught toy, 20 seeds": "imdb_untaught_sampled_kl",
    "SmolLM2-135M, 5 seeds": "imdb_partner_smollm2",
}


def panel(axis: Axes, study: Study) -> None:
    """Draws each role's ratio with its 95 % band, at the reward levels that 90 % of CORY's and of PPO's runs reach."""
    seeds = study.runs["seed"].nunique()
    at_start = study.metrics[study.metrics["iteration"] == 0].groupby(["group", "role"])
    start = at_start["task_reward"].mean()[["CORY", "PPO"]].max()
    levels = np.arange(np.ceil((start + MARGIN) * 20) / 20, 1.5, 0.05)
    for role, colour in ROLES.items():
        shown = []
        for level in levels:
            ours = kls_at_level(study, "CORY", role, level)
            theirs = kls_at_level(study, "PPO", ANY, level)
            if min(len(ours), len(theirs)) >= SHARE * seeds:
                shown.append((level, *ratio(ours, theirs)[:3]))
        x, value, low, high = np.array(shown).T
        axis.plot(x, value, color=colour, lw=2, label=NAMES[role])
        axis.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    axis.axhline(1, color="0.5", lw=1, ls="--")
    axis.set_yscale("log")
    axis.set_yticks([0.3, 0.5, 0.7, 1, 1.4, 2, 3], ["0.3", "0.5", "0.7", "1", "1.4", "2", "3"])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    figure, axes = plt.subplots(1, 3, figsize=(8, 3.4), sharey=True, layout="constrained")
    for axis, (title, folder) in zip(axes, PANELS.items(), strict=True):
        panel(axis, read_study(ROOT / "results" / folder))
        axis.set_title(title, fontsize=11)
    axes[0].set_ylabel("CORY's KL / PPO's")
    figure.supxlabel("task reward", fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(HERE / "levels.png", dpi=200)


if __name__ == "__main__":
    main()
