"""The audit of credit: each estimator's bias is the one that docs/learners.md derives, or 0."""

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
def test_biases_are_those_of_the_derivations(structure, roles):
    chain = make_chain(structure, roles, 3)
    exact = chain.objective_gradient()
    for name in UNBIASED:
        # C3's tree of three roles takes seconds.
        if roles in ESTIMATORS[name].fanouts and (roles == 2 or name != "C3, 4 x 2"):
            assert is_close(means(name, chain), exact), name
    # The n-th part of the task rewards; a team reward is not shared out.
    length = 1 if structure == "team" else 1 / roles
    assert is_close(means("mean", chain), [length * gradient for gradient in exact])
    # The group's mean includes the response itself.
    shorter = 1 - 1 / GROUP
    assert is_close(means("MAGRPO", chain), [shorter * gradient for gradient in exact])
    # Each role's gradient of what it earns itself.
    nothing = torch.zeros_like(chain.rewards[0])
    own = []
    for role in range(roles):
        rewards = [
            reward if other == role else nothing for other, reward in enumerate(chain.rewards)
        ]
        own.append(chain._replace(rewards=tuple(rewards)).objective_gradient()[role])
    assert is_close(means("own", chain), own)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_information_follows_the_likelihood_of_the_answer(structure):
    chain = make_chain(structure, 2, 3)
    likelihoods = answer_likelihoods(chain)[:, :-1]
    nothing = torch.zeros_like(likelihoods)
    told = chain.rewards[0] + INFORMATION_WEIGHT * likelihoods
    first = chain._replace(rewards=(told, nothing)).objective_gradient()[0]
    second = chain._replace(rewards=(nothing, chain.rewards[1])).objective_gradient()[1]
    assert is_close(means("information", chain), [first, second])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_estimators_that_are_the_same(structure):
    chain = make_chain(structure, 2, 5)
    tree, branches = (audit(chain, ESTIMATORS[name]) for name in ("C3, 4 x 2", "causal, B = 2"))
    assert tree == pytest.approx(branches, abs=1e-12, nan_ok=True)
    # In GRPO's advantages neither a baseline of the whole group nor a factor remains, but for its epsilon.
    of_joint = moments(
        chain,
        groups(chain, CHAINS[2]),
        lambda outcomes: [GRPO.advantages(joint_return(chain, outcomes))] * 2,
    ).means
    for got, wanted in zip(means("CCPO", chain), of_joint, strict=True):
        assert torch.allclose(got, wanted, atol=2e-5)


def test_at_grpo_trains_the_first_role_on_its_own_reward_alone():
    chain = make_chain("alike", 2, 5)
    own = (
        ESTIMATORS["sum"].outcomes(chain),
        lambda part: mode_advantages(chain, part, "own", "grpo"),
    )
    assert is_close(means("AT-GRPO", chain)[:1], moments(chain, *own).means[:1])


def test_outcomes_without_an_order_are_those_with_one():
    chain = make_chain("alike", 2, 5)
    stems = [subtrees(chain, (1, 2), query) for query in range(chain.num_queries)]
    ordered = [crossed(stem, stem).scaled(1 / chain.num_queries) for stem in stems]
    for parts in (ordered, groups(chain, (2, 2))):
        assert sum(part.chances.sum() for part in parts).item() == pytest.approx(1)
    one, other = (
        moments(chain, parts, lambda part: c3(chain, part))
        for parts in (ordered, groups(chain, (2, 2)))
    )
    assert is_close(one.means, other.means)
    assert one.variances == pytest.approx(other.variances)


def test_the_deviation_turns_the_gradient_and_the_length_that_grpo_gives_is_not_the_gradients():
    rows = audited(2, ["sum", "causal, GRPO"])
    of_grpo = rows[rows["estimator"] == "causal, GRPO"]
    assert (of_grpo["bias"] > 0.01 * of_grpo["exact"]).all()
    assert (of_grpo["angle"] > 0.01).all() and (of_grpo["angle"] < 30).all()


def test_branches_at_equal_stems_and_a_plain_count_of_tokens():
    chain = make_chain("knowledge", 2, 0)
    plain, two, unread = (
        audit(chain, ESTIMATORS[name]) for name in ("causal", "causal, B = 2", "counterfactual")
    )
    assert (plain["tokens"], two["tokens"], unread["tokens"]) == (8, 12, 12)
    assert (plain["rows"], two["rows"], unread["rows"]) == (8, 12, 8)
    assert two["variance"] < plain["variance"] < unread["variance"]
    assert two["at_equal_tokens"] == pytest.approx(12 * two["variance"])


def test_the_committed_rows_are_repeated():
    stored = pd.read_csv(ROOT / "results/credit_audit/rows.csv")
    keys = ["roles", "structure", "world", "estimator"]
    names = ["sum", "causal", "own", "information", "causal, GRPO", "AT-GRPO"]
    again = audited(1, names).set_index(keys)
    stored = stored.set_index(keys).loc[again.index]
    for column in again:
        for got, wanted in zip(again[column], stored[column], strict=True):
            both_missing = math.isnan(got) and math.isnan(wanted)
            assert both_missing or got == pytest.approx(wanted, rel=1e-6, abs=1e-9), column
