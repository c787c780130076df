"""Compares families of groups by their frontiers of task reward and KL, seed by seed.

Runs of a group differ only in their seed; a family's groups differ in the value of one key, such as eta. At each seed,
a family's runs are points, and its frontier joins the nondominated ones.
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
    """Returns a family's hypervolume minus a rival's, over seeds, relative to the hypervolume of all points."""
    ends = _complete_seeds(points(study))
    ends["minus_kl"] = -ends["kl"]
    worst = (ends["task_reward"].min(), ends["minus_kl"].min())

    def area(runs: pd.DataFrame) -> float:
        return hypervolume(list(zip(runs["task_reward"], runs["minus_kl"], strict=True)), worst)

    differences = []
    for _, runs in ends.groupby("seed"):
        total = area(runs)
        our_area, rival_area = (area(runs[runs["family"] == family]) for family in (ours, rival))
        differences.append((our_area - rival_area) / total if total > 0 else math.nan)
    return over_seeds(differences)


def frontiers_apart(study: Study, pairs: Sequence[tuple[str, str]]) -> Rows:
    """Compares pairs of families by their hypervolumes. A ✓ marks differences that survive Holm's correction.

    Raises:
        LookupError: a family does not exist.
    """
    families = set(study.runs["family"])
    for pair in pairs:
        if not families.issuperset(pair):
            raise LookupError(f"no families {pair} among {sorted(families)}")
    differences = [apart(study, *pair) for pair in pairs]
    holds = holm([interval.p for interval in differences])
    return [
        {
            "family": ours,
            "against": rival,
            "n": str(interval.n),
            "hypervolume, difference": worded(interval, "+.2f", 0.0, is_corrected),
        }
        for (ours, rival), interval, is_corrected in zip(pairs, differences, holds, strict=True)
    ]


def beaten(study: Study, calls: int = 0) -> Rows:
    """Returns a row per family and value: how many of its runs another family's frontier beats, seed by seed.

    A frontier beats a run if it has a higher task reward at the run's KL. The frontier consists of straight lines
    between the family's nondominated points. At KLs above all points, it stays at its highest reward. At KLs below all
    points, it beats no run.

    Args:
        study: the runs.
        calls: where task reward and KL are measured. 0: at the end of training, averaged over agents and their roles.
            1 or 2: on held-out queries. An agent answers alone (1), or after reading an answer (2); KLs of both answers
            are then summed.
    """
    ends = _complete_seeds(_held_out_points(study, calls) if calls else points(study))
    families = list(ends["family"].unique())
    rows = []
    for (family, value), group_ends in ends.groupby(["family", "value"], sort=False):
        row = {
            "family": str(family),
            str(study.over): str(value),
            "n": str(len(group_ends)),
            "task reward": mean_cell(group_ends["task_reward"], "task_reward"),
            "KL": mean_cell(group_ends["kl"], "kl"),
        }
        for rival in families:
            rival_ends = ends[ends["family"] == rival]
            is_beaten = [
                _is_beaten(run, rival_ends[rival_ends["seed"] == run["seed"]])
                for run in group_ends.to_dict("records")
            ]
            row[f"beaten by {rival}"] = (
                "" if rival == family else f"{sum(is_beaten)} of {len(is_beaten)}"
            )
        rows.append(row)
    return rows


def _complete_seeds(ends: pd.DataFrame) -> pd.DataFrame:
    """Returns the points of seeds that have all groups, as a missing group would make its family's frontier smaller."""
    groups = ends.groupby("seed")["group"].nunique()
    complete = groups.index[groups == ends["group"].nunique()]
    return ends[ends["seed"].isin(complete)].copy()


def _is_beaten(run: dict, rivals: pd.DataFrame) -> bool:
    """Whether the rivals' frontier has a higher task reward at the run's KL."""
    reached = list(zip(rivals["task_reward"], -rivals["kl"], strict=True))
    frontier = sorted((-reached[i][1], reached[i][0]) for i in nondominated(reached))
    if not frontier:
        return False
    kls, rewards = zip(*frontier, strict=True)
    return bool(np.interp(run["kl"], kls, rewards, left=-math.inf) > run["task_reward"])


def _held_out_points(study: Study, calls: int) -> pd.DataFrame:
    """Returns the frame of `points` for held-out queries, with the KL summed over one or two answers (calls).

    Raises:
        LookupError: there is no evaluation in this number of calls.
    """
    if calls not in CALLS:
        raise LookupError(f"no evaluation in {calls} calls among {list(CALLS)}")
    columns = {"task_reward": "task_reward", "kl": "chain_kl"}
    by_run = {
        name: held_out_by_seed(study, metric, calls).stack() for name, metric in columns.items()
    }
    values = pd.DataFrame(by_run).reset_index()
    return study.runs[[*RUN, "family", "value"]].merge(values, on=RUN)
