"""Compares groups that differ in credit assignment: iterations to a reward, and the first role's gradient norm."""

import pandas as pd

from study.cells import Rows
from study.equal_reward import SHARE, worded
from study.frame import LAST, RUN, Study
from study.intervals import difference, holm, ratio

LEVELS = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]  # levels of the last role's task reward


def confirmed(study: Study, ours: str, rival: str) -> Rows:
    """Returns two comparisons of the rival with our group, paired by seed.

    One compares the number of iterations until the last role's task reward, a running mean over ten iterations, reaches
    the highest level that 90 % of all runs reach; it is left out if they reach none. The other compares the first
    role's mean squared gradient norm in the first ten iterations. Both are primary; a ✓ marks those that survive Holm's
    correction.
    """
    is_first = study.metrics["role"] == study.first_role
    rewards = study.metrics[~is_first].pivot(index="iteration", columns=RUN, values="task_reward")
    smooth = rewards.rolling(LAST).mean()
    reached = [level for level in LEVELS if (smooth.max() >= level).mean() >= SHARE]
    early = study.metrics[is_first & (study.metrics["iteration"] < LAST)]
    squares = early.assign(square=early["gradient_norm"] ** 2).groupby(RUN)["square"].mean()

    rows = []
    intervals = []
    formats = []  # of an interval, with the value that means no difference
    if reached:
        above = smooth >= reached[-1]
        # A run that never reaches the level counts as if it did so in its last iteration.
        iterations = above.idxmax().where(above.any(), smooth.index[-1]) + 1
        rows.append(
            {"measure": f"iterations to {reached[-1]:g}"} | _means(iterations, ours, rival, 1)
        )
        intervals.append(difference(iterations[rival], iterations[ours]))
        formats.append(("+.1f", 0.0))
    rows.append({"measure": "squared gradient norm"} | _means(squares, ours, rival, 2))
    intervals.append(ratio(squares[rival], squares[ours]))
    formats.append((".2f", 1.0))

    survive = holm([interval.p for interval in intervals])
    for row, interval, (form, equal), survives in zip(
        rows, intervals, formats, survive, strict=True
    ):
        row["n"] = str(interval.n)
        row["difference or ratio"] = worded(interval, form, equal, survives)
    return rows


def _means(values: "pd.Series[float]", ours: str, rival: str, digits: int) -> dict[str, str]:
    """Formats the mean of each group's runs. The column n is filled in with the comparison."""
    means = {group: f"{values[group].mean():.{digits}f}" for group in (ours, rival)}
    return {"n": "", **means}
