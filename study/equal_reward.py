"""Runs compared on their way, not at their end: KL at equal task reward, and the time to collapse.

A method that learns more slowly has a lower KL at the end whatever else it does. At equal task reward it does not.
KLs differ between seeds by factors, so their means are geometric, and groups are compared by ratios, seed by seed.
Definitions: docs/metrics.md, "Comparison".
"""

import math
from collections.abc import Sequence

import pandas as pd

from study.frame import LAST, RUN, Study
from study.intervals import difference, direction, geometric, over_seeds, ratio

STEP = 0.25  # of the levels of task reward
SHARE = 0.9  # of the runs of every group that must reach a level
Rows = list[dict[str, str]]


def running_means(study: Study, role: str) -> pd.DataFrame:
    """Task reward and KL of a role, means over its last 10 iterations: a row for each run and iteration from the tenth.

    Whichever agent has the role; only runs without a problem.
    """
    whole = study.metrics.merge(study.whole[RUN].drop_duplicates(), on=RUN)
    rows = whole[whole["role"] == role].sort_values("iteration")
    means = rows.groupby(RUN, sort=False)[["task_reward", "kl"]].rolling(LAST).mean().dropna()
    return means.reset_index(RUN)


def kl_at(means: pd.DataFrame, level: float) -> pd.Series:
    """By run, the mean KL where the mean task reward first reaches a level; runs that never do are left out."""
    reached = means[means["task_reward"] >= level]
    return reached.groupby(RUN, sort=False)["kl"].first()


def common_levels(means: pd.DataFrame, step: float = STEP) -> list[float]:
    """The multiples of a step that 90 % of every group's runs reach, and none of the groups has from its start."""
    if not len(means):  # all runs are shorter than the window
        return []
    runs = means.groupby(RUN, sort=False)["task_reward"].agg(["first", "max"])
    groups = runs.groupby("group")
    lowest = groups["first"].mean().max()
    levels = []
    number = math.floor(lowest / step) + 1
    while all((highest >= number * step).mean() >= SHARE for _, highest in groups["max"]):
        levels.append(number * step)
        number += 1
    return levels


def equal_reward(
    study: Study, role: str | None = None, levels: Sequence[float] = (), groups: Sequence[str] = ()
) -> Rows:
    """By group: a role's KL at each level of task reward, and its ratio to the baseline's, seed by seed.

    Args:
        role: its name; None: the first, which answers the query alone as a single agent does.
        levels: default: `common_levels` of the groups.
        groups: default: all that have the role.
    """
    means = running_means(study, role or study.first_role)
    names = [name for name in groups or study.groups if name in set(means["group"])]
    means = means[means["group"].isin(names)]
    by_level = {level: kl_at(means, level) for level in levels or common_levels(means)}
    rows = []
    for name in names:
        n = means.loc[means["group"] == name, "seed"].nunique()
        row = {"group": name, "n": str(n)}
        for level, values in by_level.items():
            ours = _of_group(values, name)
            row[f"KL at {level:g}"] = f"{_mean_kl(ours)} ({len(ours)})" if len(ours) else "(0)"
            base = study.base_of(name)
            theirs = _of_group(values, base)
            row[f"ratio at {level:g}"] = _ratio(ours, theirs) if name != base else ""
        rows.append(row)
    return rows


def pairs(
    study: Study,
    compared: Sequence[tuple[str, str]],
    role: str | None = None,
    level: float | None = None,
) -> Rows:
    """By pair of groups: a role's task reward and KL at the end, and its KL at equal task reward.

    Args:
        compared: pairs of names of groups, ours and the rival, of which the seeds that both have count.
        role: its name; None: the first.
        level: of task reward; None: the highest of `common_levels` of the pair.
    """
    means = running_means(study, role or study.first_role)
    rows = []
    for name, rival in compared:
        of_pair = means[means["group"].isin([name, rival])]
        groups_of_seed = of_pair.groupby("seed")["group"].nunique()
        in_both = groups_of_seed[groups_of_seed == 2].index
        if len(in_both):
            of_pair = of_pair[of_pair["seed"].isin(in_both)]
        ends = of_pair.groupby(RUN, sort=False)[["task_reward", "kl"]].last()
        reward, rivals_reward = (_of_group(ends["task_reward"], one) for one in (name, rival))
        kl, rivals_kl = (_of_group(ends["kl"], one) for one in (name, rival))
        at = max(common_levels(of_pair), default=math.nan) if level is None else level
        at_level = kl_at(of_pair, at)
        there, rivals_there = (_of_group(at_level, one) for one in (name, rival))
        rows.append(
            {
                "group": name,
                "against": rival,
                "n": str(len(kl)),
                "task reward": f"{reward.mean():.2f}, {rivals_reward.mean():.2f}",
                "difference": _difference(reward, rivals_reward),
                "KL": f"{_mean_kl(kl)}, {_mean_kl(rivals_kl)}",
                "ratio": _ratio(kl, rivals_kl),
                "at a task reward of": "" if math.isnan(at) else f"{at:g}",
                "KL there": f"{_mean_kl(there)}, {_mean_kl(rivals_there)}",
                "ratio there": _ratio(there, rivals_there),
                "runs there": f"{len(there)}, {len(rivals_there)}",
            }
        )
    return rows


def collapse_times(study: Study) -> pd.Series:
    """By run, T: the number of iterations after which an agent has collapsed; NaN if none does.

    An agent has collapsed where its last 10 iterations have, by the rule of `cory.metrics.collapsed`.
    """
    from cory.metrics import collapsed  # here, as it imports torch

    runs = study.whole[[*RUN, "kl_bound"]].drop_duplicates(RUN)
    metrics = runs.merge(study.metrics, on=RUN)
    first = metrics[metrics["iteration"] == 0].groupby([*RUN, "role"])["distinct_2"].first()
    metrics = metrics.join(first.rename("first"), on=[*RUN, "role"])
    metrics["share"] = metrics["distinct_2"] / metrics["first"].clip(lower=1e-9)

    times = {}
    for run, of_run in metrics.groupby(RUN, sort=False):
        ends = []
        for _, rows in of_run.groupby("agent"):
            # An agent in several roles has a row for each.
            by_iteration = rows.groupby("iteration")[["share", "kl", "kl_bound"]].mean()
            means = by_iteration.rolling(LAST).mean().dropna()
            for iteration, share, kl, kl_bound in means.itertuples():
                if collapsed(share, kl, kl_bound):
                    ends.append(int(iteration) + 1)
                    break
        times[run] = min(ends, default=math.nan)
    return pd.Series(times, dtype=float).rename_axis(RUN)


def collapses(study: Study, groups: Sequence[str] = ()) -> Rows:
    """By group: how many runs collapsed on their way, and the mean time to it, with the difference to the baseline."""
    if not len(study.metrics):  # of a folder without metrics.csv.gz
        return []
    times = collapse_times(study)
    longest = int(study.metrics["iteration"].max()) + 1
    bounded = times.fillna(longest)
    rows = []
    for name in groups or study.groups:
        n = len(_of_group(times, name))
        if not n:
            continue
        ours = _of_group(bounded, name)
        base = study.base_of(name)
        rows.append(
            {
                "group": name,
                "n": str(n),
                "collapsed": f"{_of_group(times, name).notna().sum()} of {n}",
                f"mean of min(T, {longest})": over_seeds(ours).plus_minus(1),
                "difference": ""
                if name == base
                else _difference(ours, _of_group(bounded, base), digits=1),
            }
        )
    return rows


def _of_group(values: "pd.Series[float]", name: str | None) -> "pd.Series[float]":
    """The values of a group by seed."""
    of_group = values[values.index.get_level_values("group") == name]
    return of_group.droplevel("group")


def _difference(ours: "pd.Series[float]", theirs: "pd.Series[float]", digits: int = 2) -> str:
    """The difference seed by seed, and what it says."""
    if not len(ours) or not len(theirs):
        return ""
    interval = difference(ours, theirs)
    return f"{interval.text(f'+.{digits}f')} {direction(interval)}".rstrip()


def _mean_kl(values: "pd.Series[float]") -> str:
    return f"{geometric(values).value:.2f}" if len(values) else "none"


def _ratio(ours: "pd.Series[float]", theirs: "pd.Series[float]") -> str:
    """The ratio seed by seed, and what it says."""
    if not len(ours) or not len(theirs):
        return ""
    interval = ratio(ours, theirs)
    return f"{interval.text('.2f')} {direction(interval, equal=1.0)}".rstrip()
