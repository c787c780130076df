"""The credit audit: each estimator's bias is 0 or equals the bias that docs/learners.md derives."""

import math

import pandas as pd
import pytest
import torch
from conftest import ROOT

from cory.learners.algorithms import GRPO
from study.chain_gradients import crossed, groups, moments, subtrees
from study.credit import (
    ANSWERS,
    CHAINS,
    ESTIMATORS,
    GROUP,
    INFORMATION_WEIGHT,
    STRUCTURES,
    answer_likelihoods,
    audit,
    audited,
    c3,
    joint_return,
    make_chain,
    mode_advantages,
)

CHAIN_KINDS = [(structure, roles) for structure in STRUCTURES for roles in ANSWERS]
UNBIASED = ("sum", "causal", "counterfactual", "causal, B = 2", "C3, 4 x 2", "C3, 2 x 4")


def means(name, chain):
    estimator = ESTIMATORS[name]
    return moments(
        chain,
        estimator.outcomes(chain),
        lambda outcomes: estimator.advantages(chain, outcomes),
    ).means


def is_close(got, wanted):
    return torch.allclose(torch.cat(list(got)), torch.cat(list(wanted)), atol=1e-9, rtol=0)


@pytest.mark.parametrize(("structure", "roles"), CHAIN_KINDS)
def test_expected_gradients_equal_the_derived_ones(structure, roles):
    chain = make_chain(structure, roles, 3)
    exact = chain.objective_gradient()
    for name in UNBIASED:
        # C3's tree for three roles would take seconds.
        if roles in ESTIMATORS[name].fanouts and (roles == 2 or name != "C3, 4 x 2"):
            assert is_close(means(name, chain), exact), name
    # Mean credit divides task rewards by the number of roles, but not team rewards.
    factor = 1 if structure == "team" else 1 / roles
    assert is_close(means("mean", chain), [factor * gradient for gradient in exact])
    # MAGRPO subtracts a group mean that includes the response itself.
    factor = 1 - 1 / GROUP
    assert is_close(means("MAGRPO", chain), [factor * gradient for gradient in exact])
    # Own credit gives each role the gradient of its own task reward.
    zeros = torch.zeros_like(chain.rewards[0])
    own_gradients = []
    for role in range(roles):
        rewards = [reward if other == role else zeros for other, reward in enumerate(chain.rewards)]
        own_chain = chain._replace(rewards=tuple(rewards))
        own_gradients.append(own_chain.objective_gradient()[role])
    assert is_close(means("own", chain), own_gradients)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_information_credit_follows_the_likelihood_of_the_answer(structure):
    chain = make_chain(structure, 2, 3)
    likelihoods = answer_likelihoods(chain)[:, :-1]
    zeros = torch.zeros_like(likelihoods)
    informed = chain.rewards[0] + INFORMATION_WEIGHT * likelihoods
    first = chain._replace(rewards=(informed, zeros)).objective_gradient()[0]
    second = chain._replace(rewards=(zeros, chain.rewards[1])).objective_gradient()[1]
    assert is_close(means("information", chain), [first, second])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_some_estimators_are_the_same(structure):
    """C3 with 4 x 2 responses equals causal credit with two branches (observer responses per pioneer response).

    CCPO equals GRPO on the joint return.
    """
    chain = make_chain(structure, 2, 5)
    tree, branches = (audit(chain, ESTIMATORS[name]) for name in ("C3, 4 x 2", "causal, B = 2"))
    assert tree == pytest.approx(branches, abs=1e-12, nan_ok=True)
    # GRPO's advantages do not change if a group's rewards are shifted or scaled, except for the effect of epsilon.
    joint_means = moments(
        chain,
        groups(chain, CHAINS[2]),
        lambda outcomes: [GRPO.advantages(joint_return(chain, outcomes))] * 2,
    ).means
    for got, wanted in zip(means("CCPO", chain), joint_means, strict=True):
        assert torch.allclose(got, wanted, atol=2e-5)


def test_at_grpo_trains_the_first_role_only_on_its_own_reward():
    chain = make_chain("alike", 2, 5)
    own_estimator = (
        ESTIMATORS["sum"].outcomes(chain),
        lambda part: mode_advantages(chain, part, "own", "grpo"),
    )
    assert is_close(means("AT-GRPO", chain)[:1], moments(chain, *own_estimator).means[:1])


def test_unordered_outcomes_have_the_same_moments_as_ordered_ones():
    chain = make_chain("alike", 2, 5)
    trees = [subtrees(chain, (1, 2), query) for query in range(chain.num_queries)]
    ordered = [crossed(tree, tree).scaled(1 / chain.num_queries) for tree in trees]
    for parts in (ordered, groups(chain, (2, 2))):
        assert sum(part.chances.sum() for part in parts).item() == pytest.approx(1)
    one, other = (
        moments(chain, parts, lambda part: c3(chain, part))
        for parts in (ordered, groups(chain, (2, 2)))
    )
    assert is_close(one.means, other.means)
    assert one.variances == pytest.approx(other.variances)


def test_grpos_division_by_the_deviation_changes_the_gradients_length_and_direction():
    rows = audited(2, ["sum", "causal, GRPO"])
    grpo = rows[rows["estimator"] == "causal, GRPO"]
    assert (grpo["bias"] > 0.01 * grpo["exact"]).all()
    assert (grpo["angle"] > 0.01).all() and (grpo["angle"] < 30).all()


def test_costs_and_variances_of_branches_and_counterfactual_credit():
    chain = make_chain("knowledge", 2, 0)
    plain, two, unread = (
        audit(chain, ESTIMATORS[name]) for name in ("causal", "causal, B = 2", "counterfactual")
    )
    assert (plain["tokens"], two["tokens"], unread["tokens"]) == (8, 12, 12)
    assert (plain["rows"], two["rows"], unread["rows"]) == (8, 12, 8)
    assert two["variance"] < plain["variance"] < unread["variance"]
    assert two["at_equal_tokens"] == pytest.approx(12 * two["variance"])


def test_the_audit_repeats_the_stored_rows():
    stored = pd.read_csv(ROOT / "results/credit_audit/rows.csv")
    keys = ["roles", "structure", "world", "estimator"]
    names = ["sum", "causal", "own", "information", "causal, GRPO", "AT-GRPO"]
    again = audited(1, names).set_index(keys)
    stored = stored.set_index(keys).loc[again.index]
    for column in again:
        for got, wanted in zip(again[column], stored[column], strict=True):
            both_missing = math.isnan(got) and math.isnan(wanted)
            assert both_missing or got == pytest.approx(wanted, rel=1e-6, abs=1e-9), column
