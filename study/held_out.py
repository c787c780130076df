"""Compares the groups of a study on held-out queries, in one call and in two.

Definitions: docs/metrics.md, "Comparison".
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from study.cells import (
    OWN_KL_REWARD,
    Rows,
    column_title,
    difference_cell,
    difference_text,
    mean_cell,
)
from study.frame import BASE, TEAM, Study, natural

CALLS = {1: "one call", 2: "two calls"}
NOTE = (
    "Every model answers the same held-out queries. *One call*: an agent answers the query by itself (mean over a "
    "run's agents, without frozen ones). *Two calls*: an agent answers after it has read a first answer, of the other "
    "agent (mean over both orders; with fixed roles, that of training) or, where there is one agent, its own. Compare "
    "methods at equal calls."
)


def judged_by(study: Study) -> str:
    """The metric that decides: pass@1 where it was measured, else the combined reward."""
    return "pass@1" if "pass@1" in study.held_out else "combined_reward"


class Answering(NamedTuple):
    """A group, and how it answers, such as `agent_2 after agent_1` or, over all orders, `two calls`."""

    group: str
    answers: str


def held_out(study: Study, metric: str = "combined_reward", groups: Sequence[str] = ()) -> Rows:
    """By group: a metric on held-out queries in one call and in two, with the differences to the baseline.

    One call is the mean over a run's agents, each solo. Two calls are the mean over the orders of a chain of two
    agents, or one agent that answers after itself. Their combined reward stands there with the KL of both calls, and
    with that of the last answer alone.
    """
    rows = []
    by_calls = {calls: held_out_by_seed(study, metric, calls) for calls in CALLS}
    own = None
    has_kl = {"task_reward", "kl", "chain_kl"} <= set(study.held_out)
    if metric == "combined_reward" and has_kl and not by_calls[2].empty:
        with_own = replace(study, held_out=with_own_kl_reward(study.held_out))
        own = held_out_by_seed(with_own, OWN_KL_REWARD, 2)
    for name in [BASE, *(groups or study.groups)]:
        of_group = {
            calls: by_seed[name].dropna() for calls, by_seed in by_calls.items() if name in by_seed
        }
        if not of_group:
            continue
        base = None if name == BASE else study.base_of(name)
        row = {"group": name, "n": "" if name == BASE else str(max(map(len, of_group.values())))}
        for calls, title in CALLS.items():
            row[title] = mean_cell(of_group[calls], metric) if calls in of_group else ""
            row[f"difference, {title}"] = difference_cell(by_calls[calls], name, base, metric)
        if own is not None:
            title = f"{CALLS[2]}, own KL"
            row[title] = mean_cell(own[name].dropna(), metric) if name in own else ""
            row[f"difference, {title}"] = difference_cell(own, name, base, metric)
        rows.append(row)
    return rows


def held_out_by_seed(study: Study, metric: str, calls: int) -> pd.DataFrame:
    """A metric on held-out queries, mean over a run's agents or orders: a column per group, a row per seed.

    Of a pair with fixed roles only the order in which it was trained counts; in one call no agent that is frozen
    beside another.
    """
    rows = study.held_out
    rows = rows[rows["calls"] == calls]
    if calls == 1:
        rows = study.without_frozen(rows)
    fixed = study.runs.loc[study.runs["fixed_roles"], "group"].unique()
    swapped = rows["group"].isin(fixed) & ~rows["answers"].map(_in_the_order_of_training).astype(
        bool
    )
    rows = rows[~swapped]
    rows = rows.assign(seed=rows["seed"].fillna(-1))  # of the base, which has none
    by_seed = rows.groupby(["seed", "group"])[metric].mean().unstack("group")
    return by_seed.dropna(axis=1, how="all")


def _in_the_order_of_training(answers: str) -> bool:
    """Whether a chain, such as `agent_2 after agent_1`, begins with the first agent.

    >>> _in_the_order_of_training("agent_2 after agent_1"), _in_the_order_of_training("agent_1 after agent_2")
    (True, False)
    """
    first, *others = answers.split(" after ")[::-1]
    agents = others if first == "itself" else [first, *others]
    return agents == natural(agents)


def held_out_by_agent(study: Study, metrics: Sequence[str]) -> Rows:
    """By group and way of answering (`agent_1`, `agent_2 after agent_1`, ...): metrics on held-out queries."""
    rows = []
    all_rows = study.held_out
    for name in [BASE, *study.groups]:
        of_group = all_rows[all_rows["group"] == name]
        for answers, values in of_group.groupby("answers", sort=False):
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
    """A metric on held-out queries of a group's way of answering and of its rivals', and how far each is below it.

    Where one of them takes two calls, the combined reward stands there with the KL of all calls, and with that of the
    last answer alone. Intervals are over seeds: the mean of the base, which has none, is taken as given.
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
                theirs = theirs[theirs.index.isin(ours.index)]  # of the seeds that both have
                row["n"] = str(len(theirs))
            row[column_title(key)] = mean_cell(theirs, key)
            if rival.group == BASE:
                theirs = ours * 0 + theirs.iloc[0]
            kind = ", own KL" if key == OWN_KL_REWARD else ""
            title = f"{chain.group} minus it{kind} (over seeds)"
            row[title] = "" if rival == chain else difference_text(ours, theirs, key)
        rows.append(row)
    return rows


def _is_chain(answering: Answering) -> bool:
    """Whether a way of answering takes two calls or more."""
    return answering.answers == CALLS[2] or " after " in answering.answers


def with_own_kl_reward(held_out: pd.DataFrame) -> pd.DataFrame:
    """With the combined reward of each answer, of which the KL is its own alone, not that of all calls."""
    earned = held_out["task_reward"]
    if TEAM in held_out:
        earned = earned + held_out[TEAM].fillna(0)
    penalty = earned - held_out["combined_reward"]  # eta times the KL of all calls
    own_share = (held_out["kl"] / held_out["chain_kl"]).where(held_out["chain_kl"] != 0, 0.0)
    return held_out.assign(**{OWN_KL_REWARD: earned - own_share * penalty})


def _by_seed(study: Study, answering: Answering, metric: str) -> "pd.Series[float]":
    """A metric of a group's way of answering, by seed; the base's has a single value.

    `one call` and `two calls` are means over agents or orders (`held_out_by_seed`).
    """
    for calls, title in CALLS.items():
        if answering.answers == title:
            return held_out_by_seed(study, metric, calls)[answering.group].dropna()
    rows = study.held_out
    rows = rows[(rows["group"] == answering.group) & (rows["answers"] == answering.answers)]
    values = rows.set_index("seed")[metric].dropna()
    if not len(values):
        raise LookupError(f"no row of {answering.group!r}, {answering.answers!r}, with {metric}")
    return values
