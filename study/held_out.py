"""Compares groups on held-out queries, answered alone (one call) or after reading an answer (two calls).

Definitions: docs/metrics.md, "Comparison".
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pandas as pd

from cory.run.folder import agent_index
from study.cells import (
    OWN_KL_REWARD,
    Rows,
    column_title,
    difference_cell,
    difference_text,
    mean_cell,
)
from study.frame import BASE, TEAM, Study

CALLS = {1: "one call", 2: "two calls"}
BETTER_OF_TWO = ", better of two"  # may follow a way of answering (`Answering`)
NOTE = (
    "Every model answers the same held-out queries. *One call*: an agent answers the query by itself (mean over a "
    "run's agents, without frozen ones). *Two calls*: an agent answers after reading the other agent's answer, or its "
    "own if there is one agent. With two agents, the value is the mean over both orders, or the value of the order of "
    "training if roles are fixed. *Own KL* leaves out the first call's KL. Compare methods at equal calls."
)


def judged_by(study: Study) -> str:
    """Returns the metric that decides: pass@1 if all rows have it, otherwise the combined reward."""
    has_passes = "pass@1" in study.held_out and study.held_out["pass@1"].notna().all()
    return "pass@1" if has_passes else "combined_reward"


class Answering(NamedTuple):
    """A group and its way of answering, such as `agent_2 after agent_1` or, averaged over orders, `two calls`.

    `agent_1, better of two` is the response with the larger task reward out of two. It has only a task reward.
    """

    group: str
    answers: str


def held_out(study: Study, metric: str = "combined_reward", groups: Sequence[str] = ()) -> Rows:
    """Returns a row per group: a held-out metric in one call and in two, with differences from the baseline.

    One call is the mean over a run's agents, each solo. Two calls are the mean over both orders of a chain of two
    agents; a single agent answers after itself. For two calls, the combined reward is shown twice: with the KL of both
    calls, and with only the last answer's KL.
    """
    rows = []
    by_calls = {calls: held_out_by_seed(study, metric, calls) for calls in CALLS}
    own_kl = None
    has_kl = {"task_reward", "kl", "chain_kl"} <= set(study.held_out)
    if metric == "combined_reward" and has_kl and not by_calls[2].empty:
        with_own_kl = replace(study, held_out=with_own_kl_reward(study.held_out))
        own_kl = held_out_by_seed(with_own_kl, OWN_KL_REWARD, 2)
    for name in [BASE, *(groups or study.groups)]:
        values = {
            calls: by_seed[name].dropna() for calls, by_seed in by_calls.items() if name in by_seed
        }
        if not values:
            continue
        base = None if name == BASE else study.base_of(name)
        row = {"group": name, "n": "" if name == BASE else str(max(map(len, values.values())))}
        for calls, title in CALLS.items():
            row[title] = mean_cell(values[calls], metric) if calls in values else ""
            row[f"difference, {title}"] = difference_cell(by_calls[calls], name, base, metric)
        if own_kl is not None:
            title = f"{CALLS[2]}, own KL"
            row[title] = mean_cell(own_kl[name].dropna(), metric) if name in own_kl else ""
            row[f"difference, {title}"] = difference_cell(own_kl, name, base, metric)
        rows.append(row)
    return rows


def held_out_by_seed(study: Study, metric: str, calls: int) -> pd.DataFrame:
    """Returns a metric on held-out queries, averaged over a run's agents or orders: a column per group, a row per seed.

    A pair with fixed roles counts only in the order in which it was trained. In one call, agents that are frozen while
    others learn are left out.
    """
    rows = study.held_out
    rows = rows[rows["calls"] == calls]
    if calls == 1:
        rows = study.without_frozen(rows)
    fixed = study.runs.loc[study.runs["fixed_roles"], "group"].unique()
    in_order = rows["answers"].map(_is_training_order).astype(bool)
    swapped = rows["group"].isin(fixed) & ~in_order
    rows = rows[~swapped]
    rows = rows.assign(seed=rows["seed"].fillna(-1))  # the untrained model has no seed
    by_seed = rows.groupby(["seed", "group"])[metric].mean().unstack("group")
    return by_seed.dropna(axis=1, how="all")


def _is_training_order(answers: str) -> bool:
    """Whether a chain, such as `agent_2 after agent_1`, has agents that followed each other in training.

    >>> _is_training_order("agent_2 after agent_1"), _is_training_order("agent_1 after agent_2")
    (True, False)
    >>> _is_training_order("agent_3 after agent_1"), _is_training_order("base after itself")
    (False, True)
    """
    first, *others = answers.split(" after ")[::-1]
    agents = others if first == "itself" else [first, *others]
    return all(agent_index(b) == agent_index(a) + 1 for a, b in pairwise(agents))


def held_out_by_agent(study: Study, metrics: Sequence[str]) -> Rows:
    """Returns held-out metrics by group and way of answering (`agent_1`, `agent_2 after agent_1`, ...)."""
    rows = []
    all_rows = study.held_out
    for name in [BASE, *study.groups]:
        group_rows = all_rows[all_rows["group"] == name]
        for answers, values in group_rows.groupby("answers", sort=False):
            row = {
                "group": name,
                "answers": str(answers),
                "n": "" if name == BASE else str(len(values)),
            }
            for metric in metrics:
                row[column_title(metric)] = mean_cell(values[metric].dropna(), metric)
            rows.append(row)
    return rows


def against_rivals(
    study: Study, chain: Answering, rivals: Sequence[Answering], metric: str
) -> Rows:
    """Compares a chain with its rivals on held-out queries: one row each, with the chain's difference from the rival.

    If the chain or a rival takes two calls, the combined reward is shown twice: with the KL of all calls, and with only
    the last answer's KL. Intervals are over seeds. The untrained model has no seeds, so its mean counts as exact.
    """
    answerings = [chain, *rivals]
    shown = [metric]
    if metric == "combined_reward" and any(map(_is_chain, answerings)):
        shown.append(OWN_KL_REWARD)
        study = replace(study, held_out=with_own_kl_reward(study.held_out))
    rows = []
    for rival in answerings:
        row = {"group": rival.group, "answers": rival.answers, "n": ""}
        for key in shown:
            ours, theirs = _by_seed(study, chain, key), _by_seed(study, rival, key)
            if rival.group != BASE:
                theirs = theirs[theirs.index.isin(ours.index)]  # only seeds that both have
                row["n"] = str(len(theirs))
            row[column_title(key)] = mean_cell(theirs, key)
            if rival.group == BASE:
                theirs = ours * 0 + theirs.iloc[0]
            kind = ", own KL" if key == OWN_KL_REWARD else ""
            title = f'"{chain.group}" minus this row{kind} (over seeds)'
            row[title] = "" if rival == chain else difference_text(ours, theirs, key)
        rows.append(row)
    return rows


def _is_chain(answering: Answering) -> bool:
    """Whether a way of answering takes at least two calls."""
    return answering.answers == CALLS[2] or " after " in answering.answers


def with_own_kl_reward(held_out: pd.DataFrame) -> pd.DataFrame:
    """Adds `own_kl_reward`, the combined reward with the last answer's KL in place of the KL of all calls."""
    earned = held_out["task_reward"]
    if TEAM in held_out:
        earned = earned + held_out[TEAM].fillna(0)
    penalty = earned - held_out["combined_reward"]  # eta times the KL of all calls
    own_share = (held_out["kl"] / held_out["chain_kl"]).where(held_out["chain_kl"] != 0, 0.0)
    return held_out.assign(**{OWN_KL_REWARD: earned - own_share * penalty})


def _by_seed(study: Study, answering: Answering, metric: str) -> "pd.Series[float]":
    """Returns a metric of a group's way of answering, by seed; the untrained model has a single value.

    `one call` and `two calls` are means over agents or orders (`held_out_by_seed`).
    """
    for calls, title in CALLS.items():
        if answering.answers == title:
            return held_out_by_seed(study, metric, calls)[answering.group].dropna()
    answers = answering.answers.removesuffix(BETTER_OF_TWO)
    rows = study.held_out
    rows = rows[(rows["group"] == answering.group) & (rows["answers"] == answers)]
    if answers != answering.answers:
        if metric != "task_reward":
            raise LookupError(f"{answering.answers!r} has only task_reward, got {metric}")
        metric = "best_of_2"
    values = rows.set_index("seed")[metric].dropna()
    if not len(values):
        raise LookupError(f"no row of {answering.group!r}, {answering.answers!r}, with {metric}")
    return values
