"""Compares the method with a single PPO agent: in training, at equal task reward, and held out.

The training columns are the paper's comparison: each agent's task reward and KL for its own answers, in all roles. On
held-out queries, two agents that answer in turn (two calls) are compared with a user's alternative: one PPO agent that
answers once.
"""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from study.cells import OWN_KL_REWARD, Rows
from study.equal_reward import (
    ANY,
    chosen_level,
    ratios_in_all_readings,
    verdict,
    worded,
)
from study.frame import Study, last
from study.held_out import held_out_by_seed, with_own_kl_reward
from study.intervals import Interval, difference, holm

REWARD = "combined_reward"


def against_one_agent(
    study: Study, ours: Sequence[str], rival: str, candidates: Sequence[float]
) -> Rows:
    """Returns one row that compares our group with PPO: combined reward, KL at equal task reward, and held-out reward.

    The combined reward and the KL ratio, both averaged over roles, are the primary comparisons. A ✓ marks those that
    survive Holm's correction over the two. If fewer seeds reach the level or were evaluated, a cell names their number.

    Args:
        study: the runs.
        ours: candidates for the method's group; the first one found in the study is used.
        rival: the name of the group with a single agent.
        candidates: levels of task reward; the first seeds choose one (`chosen_level`).

    Raises:
        LookupError: the study has none of these groups.
    """
    name = next((group for group in ours if group in study.groups), None)
    if name is None:
        raise LookupError(f"no group of {list(ours)} among {study.groups}")
    reward = _difference(study.by_seed(REWARD), name, rival)
    as_pioneer = _difference(_in_first_role(study), name, rival)

    level = chosen_level(study, (name, rival), ANY, candidates)
    ratios = {} if level is None else ratios_in_all_readings(study, (name, rival), ANY, level)
    fit = ratios.get("fit", Interval(float("nan"), float("nan"), float("nan"), 0))
    reward_holds, fit_holds = holm([reward.p, fit.p])
    ratio_cell = worded(fit, ".2f", 1.0, fit_holds)
    if ratios and verdict(ratios).endswith("fragile"):
        ratio_cell += ", fragile"
    if 0 < fit.n < reward.n:  # seeds in which both runs reach the level
        ratio_cell += f", n = {fit.n}"

    return [
        {
            "n": str(reward.n),
            "combined reward": worded(reward, "+.2f", 0.0, reward_holds),
            "as pioneer": worded(as_pioneer, "+.2f", 0.0),
            "level": "none" if level is None else f"{level:g}",
            "KL there, ratio": ratio_cell,
            "two calls - PPO once, both KLs": _held_out(study, name, rival, REWARD, reward.n),
            "the same, last answer's KL": _held_out(study, name, rival, OWN_KL_REWARD, reward.n),
        }
    ]


def _difference(by_seed: pd.DataFrame, ours: str, rival: str) -> Interval:
    """Returns our value minus the rival's, seed by seed; `by_seed` has a column per group."""
    return difference(by_seed[ours].dropna(), by_seed[rival].dropna())


def _in_first_role(study: Study) -> pd.DataFrame:
    """Returns the combined reward of the role that answers the query alone: a column per group, a row per seed."""
    rows = last(study.of_role(study.first_role).metrics)
    return rows.groupby(["seed", "group"])[REWARD].mean().unstack("group")


def _held_out(study: Study, ours: str, rival: str, metric: str, trained: int) -> str:
    """Formats our held-out reward in two calls minus the rival's in one call; empty without an evaluation.

    If fewer seeds were evaluated than trained, the cell names their number.
    """
    if study.held_out.empty or "chain_kl" not in study.held_out:
        return ""
    with_both = replace(study, held_out=with_own_kl_reward(study.held_out))
    chain = held_out_by_seed(with_both, metric, 2)[ours].dropna()
    once = held_out_by_seed(with_both, metric, 1)[rival].dropna()
    held_out = difference(chain, once)
    return worded(held_out, "+.2f", 0.0) + (f", n = {held_out.n}" if held_out.n < trained else "")
