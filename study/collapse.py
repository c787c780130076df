"""Finds when runs collapse: their texts repeat themselves, or their KL exceeds its bound.

Definitions: docs/metrics.md, "Collapse".
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from cory.metrics import collapsed
from study.cells import Rows
from study.equal_reward import of_group, worded
from study.frame import KL_GUARD, LAST, RUN, Study
from study.intervals import difference, holm, over_seeds

SMALLEST_SPREAD = 1e-9  # sum of squared deviations, in tokens, below which lengths count as equal


def collapse_times(study: Study) -> pd.DataFrame:
    """Returns each run's iterations until an agent collapses, by cause (`kl` or `texts`); NaN if no agent does.

    An agent collapses when its means over 10 iterations meet the rule of `cory.metrics.collapsed`. In a run that the KL
    guard ended, the last iteration alone suffices: an agent collapses if its KL exceeds the bound.
    """
    stopped_by = dict(zip(study.names, study.runs["stopped_by"], strict=True))
    times = {}
    for run, run_metrics in _with_share(study).groupby(RUN, sort=False):
        by_kl, by_texts = [], []
        for _, rows in run_metrics.groupby("agent"):
            # An agent in several roles has several rows per iteration.
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


def _with_share(study: Study) -> pd.DataFrame:
    """Adds `kl_bound`, and `share`: distinct-2 divided by an untrained agent's distinct-2; NaN for answers of one word.

    Agents that are frozen while others learn are left out.
    """
    expected = _untrained_distinct_2(study)
    bounds = study.runs[[*RUN, "kl_bound"]].drop_duplicates(RUN)
    learning = study.without_frozen(study.metrics.assign(expected=expected))
    metrics = bounds.merge(learning, on=RUN)
    return metrics.assign(share=metrics["distinct_2"] / metrics["expected"])


def _untrained_distinct_2(study: Study) -> "pd.Series[float]":
    """Estimates an untrained agent's distinct-2 for each row of the metrics, given the row's role and response length.

    Longer responses repeat more, and a batch's length is drawn at random. The estimate is therefore a least-squares fit
    to the first iterations of all runs: log distinct-2 is linear in the response length, with an intercept per group
    and role and a slope per role.
    """
    start = study.without_frozen(study.metrics)
    start = start[(start["iteration"] == 0) & (start["distinct_2"] > 0)]
    start = start.assign(log=np.log(start["distinct_2"]))
    columns = ["log", "response_tokens"]
    means = start.groupby(["group", "role"])[columns].mean()
    slopes = {}
    for role, rows in start.groupby("role"):
        deviations = rows[columns] - rows.groupby("group")[columns].transform("mean")
        lengths = deviations["response_tokens"]
        spread = float((lengths**2).sum())
        is_fitted = study.drawn_length is not None and spread > SMALLEST_SPREAD
        slopes[role] = (deviations["log"] @ lengths) / spread if is_fitted else 0.0

    metrics = study.metrics[["group", "role", "response_tokens"]]
    at_mean = metrics[["group", "role"]].join(means, on=["group", "role"])
    longer = metrics["response_tokens"] - at_mean["response_tokens"]
    return np.exp(at_mean["log"] + metrics["role"].map(slopes) * longer)


def collapses(study: Study, groups: Sequence[str] = (), primary: Sequence[str] = ()) -> Rows:
    """Returns a row per group: how many runs collapsed and why, and the mean time to collapse.

    The mean time is compared with the baseline's. A ✓ marks primary differences that survive Holm's correction.

    Args:
        study: the runs.
        groups: the groups to show. Empty: all.
        primary: the groups whose differences from the baseline are primary.

    Raises:
        ValueError: runs were planned with different numbers of iterations.
        LookupError: a primary group has no run.
    """
    if not len(study.metrics):  # the folder of results has no metrics.csv.gz
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
    """Returns the number of iterations planned for every run."""
    planned = {int(number) for number in study.runs["planned"]}
    if len(planned) > 1:
        raise ValueError(
            f"planned: expected one number of iterations for all runs, got {sorted(planned)}"
        )
    return planned.pop()
