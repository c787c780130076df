"""Makes a table that compares groups with the baseline, metric by metric. Shared seeds are paired."""

from collections.abc import Sequence

import pandas as pd

from cory.metrics import TITLES
from study.cells import Rows
from study.equal_reward import worded
from study.frame import Study
from study.held_out import held_out_by_seed
from study.intervals import difference, holm, over_seeds

HELD_OUT = "held out: "  # prefix of an evaluation's metrics


def differences(
    study: Study, metrics: Sequence[str], calls: int = 1, groups: Sequence[str] = ()
) -> Rows:
    """Returns a row per metric and group: the group's mean, the baseline's mean, and their difference.

    A ✓ marks differences that survive Holm's correction over all rows. If a group and the baseline share at
    least two seeds, only shared seeds count.

    Args:
        metrics: metrics at the end of training; with the prefix `held out: `, metrics of the evaluation.
        calls: the number of calls for held-out metrics. 1: an agent answers by itself. 2: it reads an earlier answer.
        groups: the groups to compare with the baseline. Empty: all.
    """
    compared = []
    for metric in metrics:
        by_seed = _by_seed(study, metric, calls)
        for name in groups or study.groups:
            base = study.base_of(name)
            if base is not None and base != name:
                ours, theirs = by_seed[name].dropna(), by_seed[base].dropna()
                seeds = ours.index.intersection(theirs.index)
                if len(seeds) > 1:
                    ours, theirs = ours[seeds], theirs[seeds]
                row = {
                    "metric": _title(metric),
                    "group": name,
                    "n": str(len(ours)),
                    "mean": over_seeds(ours).plus_minus(3),
                    f"mean of {base}": over_seeds(theirs).plus_minus(3),
                }
                compared.append((row, difference(ours, theirs)))
    holds = holm([interval.p for _, interval in compared])
    return [
        row | {"difference": worded(interval, "+.3f", 0.0, is_held)}
        for (row, interval), is_held in zip(compared, holds, strict=True)
    ]


def _by_seed(study: Study, metric: str, calls: int) -> pd.DataFrame:
    """Returns a metric with a column per group and a row per seed."""
    if metric.startswith(HELD_OUT):
        return held_out_by_seed(study, metric.removeprefix(HELD_OUT), calls)
    return study.by_seed(metric)


def _title(metric: str) -> str:
    if metric.startswith(HELD_OUT):
        return f"{HELD_OUT}{_title(metric.removeprefix(HELD_OUT))}"
    return TITLES.get(metric, metric)
