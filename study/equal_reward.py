"""Runs compared on their way, not at their end: KL at equal task reward, and the time to collapse.

A method that learns more slowly has a lower KL at the end whatever else it does. At equal task reward it does not.
KLs differ between seeds by factors, so their means are geometric, and groups are compared by ratios, seed by seed.
Definitions: docs/metrics.md, "Comparison".
"""

import math
from collections.abc import Sequence

import pandas as pd

from study.cells import Rows
from study.frame import KL_GUARD, LAST, RUN, Study, with_share
from study.intervals import Interval, difference, direction, geometric, over_seeds, ratio

ALIKE = (0.8, 1.25)  # two KLs whose ratio's interval lies between these are alike
CORRECTED = "✓"
STEP = 0.25  # of the levels of task reward
SHARE = 0.9  # of the runs of every group that must reach a level


def running_means(study: Study, role: str) -> pd.DataFrame:
    """Task reward and KL of a role, means over its last 10 iterations: a row for each run and iteration from the tenth.

    Whichever agent has the role; only runs without a problem. One that the guard of the KL has ended before has a row
    of all its iterations, as leaving it out would flatter its group.
    """
    whole = study.whole_metrics
    rows = whole[whole["role"] == role].sort_values("iteration")
    columns = ["task_reward", "kl"]
    means = rows.groupby(RUN, sort=False)[columns].rolling(LAST).mean().dropna().reset_index(RUN)
    stopped = study.runs[study.runs["stopped_by"] == KL_GUARD][RUN]
    short = stopped[~pd.MultiIndex.from_frame(stopped).isin(pd.MultiIndex.from_frame(means[RUN]))]
    of_short = rows.merge(short.drop_duplicates(), on=RUN).groupby(RUN, sort=False)[columns].mean()
    return pd.concat([means, of_short.reset_index()]) if len(of_short) else means


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
            ours = of_group(values, name)
            mean = kl_text(geometric(ours).value)
            row[f"KL at {level:g}"] = f"{mean} ({len(ours)})" if len(ours) else "(0)"
            base = study.base_of(name)
            to_base = worded(ratio(ours, of_group(values, base)), ".2f", equal=1.0)
            row[f"ratio at {level:g}"] = to_base if name != base else ""
        rows.append(row)
    return rows


def of_common_seeds(means: pd.DataFrame, names: tuple[str, str]) -> pd.DataFrame:
    """The rows of two groups and of the seeds that both have, or of all seeds if they have none in common."""
    of_pair = means[means["group"].isin(names)]
    groups_of_seed = of_pair.groupby("seed")["group"].nunique()
    in_both = groups_of_seed[groups_of_seed == 2].index
    return of_pair[of_pair["seed"].isin(in_both)] if len(in_both) else of_pair


def collapse_times(study: Study) -> pd.DataFrame:
    """By run, the numbers of iterations after which an agent has collapsed, by its `kl` and by its `texts`; NaN if none
    does.

    An agent has collapsed where the means of its last 10 iterations have, by the rule of `cory.metrics.collapsed`; by
    its KL at the latest where that of its last iteration is above the bound, as where a guard ends a run that explodes.
    """
    from cory.metrics import collapsed  # here, as it imports torch

    times = {}
    for run, of_run in with_share(study.metrics, study.whole).groupby(RUN, sort=False):
        by_kl, by_texts = [], []
        for _, rows in of_run.groupby("agent"):
            # An agent in several roles has a row for each.
            by_iteration = rows.groupby("iteration")[["share", "kl", "kl_bound"]].mean()
            for iteration, share, kl, bound in by_iteration.rolling(LAST).mean().itertuples():
                if collapsed(1.0, kl, bound):
                    by_kl.append(int(iteration) + 1)
                if collapsed(share, 0.0, bound):
                    by_texts.append(int(iteration) + 1)
            end = by_iteration.iloc[-1]
            if collapsed(1.0, end["kl"], end["kl_bound"]):
                by_kl.append(int(by_iteration.index[-1]) + 1)
        times[run] = {
            "kl": min(by_kl, default=math.nan),
            "texts": min(by_texts, default=math.nan),
        }
    return pd.DataFrame.from_dict(times, orient="index", columns=["kl", "texts"]).rename_axis(RUN)


def collapses(study: Study, groups: Sequence[str] = ()) -> Rows:
    """By group: how many runs collapsed on their way, by what, and the mean time to it, with the difference to the
    baseline.

    Raises:
        ValueError: runs of several planned lengths.
    """
    if not len(study.metrics):  # of a folder without metrics.csv.gz
        return []
    by_cause = collapse_times(study)
    times = by_cause.min(axis=1)
    longest = _planned(study)
    bounded = times.fillna(longest)
    rows = []
    for name in groups or study.groups:
        n = len(of_group(times, name))
        if not n:
            continue
        ours = of_group(bounded, name)
        base = study.base_of(name)
        rows.append(
            {
                "group": name,
                "n": str(n),
                "collapsed": f"{of_group(times, name).notna().sum()} of {n}",
                "by KL": str(of_group(by_cause["kl"], name).notna().sum()),
                "by distinct-2": str(of_group(by_cause["texts"], name).notna().sum()),
                f"mean of min(T, {longest})": over_seeds(ours).plus_minus(1),
                "difference": ""
                if name == base or not times.notna().any()
                else worded(difference(ours, of_group(bounded, base)), "+.1f", equal=0.0),
            }
        )
    return rows


def _planned(study: Study) -> int:
    """The planned iterations of all runs; of older rows, which lack them, the longest that a run has."""
    planned = {int(number) for number in study.whole["planned"].dropna()}
    if len(planned) > 1:
        raise ValueError(f"expected runs of one planned length, got {sorted(planned)}")
    return planned.pop() if planned else int(study.metrics["iteration"].max()) + 1


def of_group(values: "pd.Series[float]", name: str | None) -> "pd.Series[float]":
    """The values of a group by seed."""
    return values[values.index.get_level_values("group") == name].droplevel("group")


def worded(interval: Interval, form: str, equal: float, holds: bool = False) -> str:
    """An interval and what it says, with a ✓ where that also `holds` when all of a table are corrected for.

    Empty where there is no value, as no run has one.
    """
    if math.isnan(interval.value):
        return ""
    word = direction(interval, equal)
    is_within = ALIKE[0] <= interval.low and interval.high <= ALIKE[1]
    if word == "undecided" and equal == 1 and is_within:
        word = "alike"
    tick = CORRECTED if holds and word else ""
    return f"{interval.text(form)} {word} {tick}".strip()


def kl_text(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.2f}"
