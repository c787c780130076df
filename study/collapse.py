"""When runs collapse: their texts repeat themselves, or their KL leaves its bound. Definitions: docs/metrics.md."""

import math
from collections.abc import Sequence

import pandas as pd

from study.cells import Rows
from study.equal_reward import of_group, worded
from study.frame import KL_GUARD, LAST, RUN, Study
from study.intervals import difference, holm, over_seeds


def collapse_times(study: Study) -> pd.DataFrame:
    """By run, the numbers of iterations after which an agent has collapsed, by its `kl` and by its `texts`; NaN if none
    does.

    An agent has collapsed where the means of its last 10 iterations have, by the rule of `cory.metrics.collapsed`. In a
    run that the guard of the KL has ended, so has one whose KL is above the bound in the last iteration.
    """
    from cory.metrics import collapsed  # here, as it imports torch

    stopped_by = dict(zip(study.names, study.runs["stopped_by"], strict=True))
    times = {}
    for run, of_run in _with_share(study.metrics, study.runs).groupby(RUN, sort=False):
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
            if stopped_by[run] == KL_GUARD and collapsed(1.0, end["kl"], end["kl_bound"]):
                by_kl.append(int(by_iteration.index[-1]) + 1)
        times[run] = {
            "kl": min(by_kl, default=math.nan),
            "texts": min(by_texts, default=math.nan),
        }
    return pd.DataFrame.from_dict(times, orient="index", columns=["kl", "texts"]).rename_axis(RUN)


def _with_share(metrics: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The metrics of some runs, in their order, with their `kl_bound` and, as `share`, distinct-2 over that of the same
    role in the first iteration; NaN where that is 0, as of answers of one word.
    """
    metrics = runs[[*RUN, "kl_bound"]].drop_duplicates(RUN).merge(metrics, on=RUN)
    of_first = metrics[metrics["iteration"] == 0].groupby([*RUN, "role"])["distinct_2"].first()
    metrics = metrics.join(of_first.rename("first"), on=[*RUN, "role"])
    share = metrics["distinct_2"] / metrics["first"].where(metrics["first"] > 0)
    return metrics.drop(columns="first").assign(share=share)


def collapses(study: Study, groups: Sequence[str] = (), primary: Sequence[str] = ()) -> Rows:
    """By group: how many runs collapsed on their way, by what, and the mean time to it, with the difference to the
    baseline.

    A ✓ stands where the difference of a `primary` group also holds when all of these are corrected for (Holm).

    Raises:
        ValueError: runs of several planned lengths.
        LookupError: no run of a primary group.
    """
    if not len(study.metrics):  # of a folder without metrics.csv.gz
        return []
    by_cause = collapse_times(study)
    times = by_cause.min(axis=1)
    longest = planned_iterations(study)
    bounded = times.fillna(longest)

    differences = {}
    for name in primary:
        ours, rival = of_group(bounded, name), of_group(bounded, study.base_of(name))
        if not len(ours):
            raise LookupError(f"no group {name!r} among {study.groups}")
        differences[name] = difference(ours, rival)
    tests = holm([interval.p for interval in differences.values()])
    holds = dict(zip(differences, tests, strict=True))
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
                else worded(
                    difference(ours, of_group(bounded, base)), "+.1f", 0.0, holds.get(name, False)
                ),
            }
        )
    return rows


def planned_iterations(study: Study) -> int:
    """The planned iterations of all runs; of older rows, which lack them, the longest that a run has."""
    planned = {int(number) for number in study.runs["planned"].dropna()}
    if len(planned) > 1:
        raise ValueError(f"expected runs of one planned length, got {sorted(planned)}")
    return planned.pop() if planned else int(study.metrics["iteration"].max()) + 1
