"""Frontiers of task reward and KL over the values of a key: whose lies outside, seed by seed.

Definitions: docs/metrics.md, "Comparison".
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from study.cells import Rows, mean_cell
from study.comparison import points
from study.equal_reward import worded
from study.frame import RUN, Study
from study.held_out import CALLS, held_out_by_seed
from study.intervals import Interval, holm, hypervolume, nondominated, over_seeds


def apart(study: Study, ours: str, rival: str) -> Interval:
    """A family's hypervolume minus a rival's, over that of all points, of each seed's runs."""
    ends = _of_whole_seeds(points(study))
    ends["minus_kl"] = -ends["kl"]
    worst = (ends["task_reward"].min(), ends["minus_kl"].min())

    def area(runs: pd.DataFrame) -> float:
        return hypervolume(list(zip(runs["task_reward"], runs["minus_kl"], strict=True)), worst)

    differences = []
    for _, runs in ends.groupby("seed"):
        whole = area(runs)
        of_both = [area(runs[runs["family"] == family]) for family in (ours, rival)]
        differences.append((of_both[0] - of_both[1]) / whole if whole > 0 else math.nan)
    return over_seeds(differences)


def frontiers_apart(study: Study, pairs: Sequence[tuple[str, str]]) -> Rows:
    """By pair of families: their hypervolumes' difference, with a ✓ where it holds when all are corrected for.

    Raises:
        LookupError: there is no such family.
    """
    known = set(study.runs["family"])
    for pair in pairs:
        if not known.issuperset(pair):
            raise LookupError(f"no families {pair} among {sorted(known)}")
    differences = [apart(study, *pair) for pair in pairs]
    holds = holm([interval.p for interval in differences])
    return [
        {
            "family": ours,
            "against": rival,
            "n": str(interval.n),
            "hypervolume, difference": worded(interval, "+.2f", 0.0, held),
        }
        for (ours, rival), interval, held in zip(pairs, differences, holds, strict=True)
    ]


def beaten(study: Study, calls: int = 0) -> Rows:
    """By family and value: in how many seeds the frontier of another family beats the run.

    That is, where it has a higher task reward at the run's KL: on the straight lines between the points that none of
    its own beats, and its highest at larger KLs. A run at a lower KL than all of the other's is beaten by none.

    Args:
        calls: 0: at the end of training, by an LLM's own KL in whatever role. 1 or 2: held out, in so many calls, by
            the KL of all of them.
    """
    ends = _of_whole_seeds(_held_out_points(study, calls) if calls else points(study))
    families = list(ends["family"].unique())
    rows = []
    for (family, value), of_group in ends.groupby(["family", "value"], sort=False):
        row = {
            "family": str(family),
            str(study.over): str(value),
            "n": str(len(of_group)),
            "task reward": mean_cell(of_group["task_reward"], "task_reward"),
            "KL": mean_cell(of_group["kl"], "kl"),
        }
        for rival in families:
            of_rival = ends[ends["family"] == rival]
            counted = [
                _is_beaten(run, of_rival[of_rival["seed"] == run["seed"]])
                for run in of_group.to_dict("records")
            ]
            row[f"beaten by {rival}"] = (
                "" if rival == family else f"{sum(counted)} of {len(counted)}"
            )
        rows.append(row)
    return rows


def _of_whole_seeds(ends: pd.DataFrame) -> pd.DataFrame:
    """The points of seeds that have all groups; a family that lacks some would have a smaller frontier there."""
    groups = ends.groupby("seed")["group"].nunique()
    whole = groups.index[groups == ends["group"].nunique()]
    return ends[ends["seed"].isin(whole)].copy()


def _is_beaten(run: dict, rivals: pd.DataFrame) -> bool:
    """Whether a frontier of some runs has a higher task reward at the run's KL."""
    reached = list(zip(rivals["task_reward"], -rivals["kl"], strict=True))
    frontier = sorted((-reached[i][1], reached[i][0]) for i in nondominated(reached))
    if not frontier:
        return False
    kls, rewards = zip(*frontier, strict=True)
    return bool(np.interp(run["kl"], kls, rewards, left=-math.inf) > run["task_reward"])


def _held_out_points(study: Study, calls: int) -> pd.DataFrame:
    """As `points`, on held-out queries, with the KL of all calls.

    Raises:
        LookupError: no run was evaluated in so many calls.
    """
    if calls not in CALLS:
        raise LookupError(f"no number of calls {calls} among {list(CALLS)}")
    columns = {"task_reward": "task_reward", "kl": "chain_kl"}
    by_run = {
        name: held_out_by_seed(study, metric, calls).stack() for name, metric in columns.items()
    }
    values = pd.DataFrame(by_run).reset_index()
    return study.runs[[*RUN, "family", "value"]].merge(values, on=RUN)
