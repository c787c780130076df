"""Role schedule, credit, prompts and text metrics against plain loops and hand-worked cases."""

import math
import statistics

import pytest
import torch

from cory.chain import RoleSchedule
from cory.credit import assign_credit
from cory.metrics import (
    distinct,
    distinct_interval,
    mean_interval,
)
from cory.roles import RolePrompts


def test_roles_follow_algorithm_1():
    """Roles are exchanged after iteration k if (k + 1) % T_REx == 0."""
    schedule, order = RoleSchedule(2, 3), (0, 1)
    for k in range(12):
        assert schedule.order(k) == order
        if (k + 1) % 3 == 0:
            order = order[::-1]


def test_period_zero_never_exchanges():
    assert {RoleSchedule(2, 0).order(k) for k in range(50)} == {(0, 1)}


@pytest.mark.parametrize(("agents", "length"), [(3, 3), (2, 3), (1, 2), (1, 1)])
def test_every_agent_is_in_each_role_equally_often(agents, length):
    schedule = RoleSchedule(agents, 2, length)
    periods = 60  # a multiple of all cycles
    chains = [schedule.order(2 * period) for period in range(periods)]
    assert all(len(chain) == length and len(set(chain)) == agents for chain in chains)
    drawn = [sum(chain.count(agent) for chain in chains) for agent in range(agents)]
    assert len(set(drawn)) == 1 and sum(drawn) == periods * length
    assert all(
        schedule.order(2 * period) == schedule.order(2 * period + 1) for period in range(periods)
    )
    # Every agent also occurs in each role.
    assert all(len({chain[role] for chain in chains}) == agents for role in range(length))


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0, -1.0])
@pytest.mark.parametrize("roles", [1, 2, 3])
def test_credit_equals_a_plain_loop(weight, roles):
    rewards, unread = list(torch.randn(roles, 4)), list(torch.randn(roles, 4))
    information = list(torch.randn(roles, 4))
    for i in range(roles):
        reward, later = rewards[i], range(i + 1, roles)
        expected = {
            "collective": reward + weight * sum(rewards[j] for j in range(roles) if j != i),
            "mean": (reward + weight * sum(rewards[j] for j in range(roles) if j != i)) / roles,
            "causal": reward + weight * sum(rewards[j] for j in later),
            "own": reward,
            "counterfactual": reward + weight * sum(rewards[j] - unread[j] for j in later),
            "information": reward + weight * sum(information[j] for j in later),
        }
        for mode, value in expected.items():
            credit = assign_credit(rewards, mode, weight, unread[1:], information=information[1:])
            assert torch.allclose(credit[i], value, atol=1e-6), mode


def test_braces_in_texts_are_not_placeholders():
    prompts = RolePrompts(observer="{{{prompt}}} {response} {label}")
    assert (
        prompts.render(1, {"prompt": "{response}", "label": 3}, ["{0.__class__}"])
        == "{{response}} {0.__class__} 3"
    )


def test_distinct_on_hand_worked_cases():
    assert distinct(["a b a b", "a b"], 1) == 2 / 6
    assert distinct(["a b a b", "a b"], 2) == 2 / 4
    assert distinct(["a"], 2) == 0


def test_distinct_interval_is_small_for_many_texts_and_zero_for_equal_ones():
    texts = [f"w{i % 7} w{i % 5} w{i % 11}" for i in range(400)]
    value, half = distinct_interval(texts, 2)
    assert value == distinct(texts, 2) and 0 < half < 0.1
    assert distinct_interval(["a b"] * 50, 1) == (
        pytest.approx(1 / 50),
        pytest.approx(0.0, abs=1e-9),
    )


def test_intervals_cluster_by_query():
    """Four values have the mean 2. Their deviations sum to -2, 2 and 0 within the three queries."""
    values, queries = [1.0, 4.0, 1.0, 2.0], ["a", "b", "a", "c"]
    mean, half = mean_interval(values, queries)
    assert mean == 2.0 and half == pytest.approx(4.302653 * math.sqrt(3 / 2 * (4 + 4 + 0) / 4**2))
    assert mean_interval(values, ["a"] * 4) == (2.0, None)
    distinct_queries = mean_interval(values, range(4))
    assert (
        distinct_queries
        == mean_interval(values)
        == (2.0, pytest.approx(3.182446 * statistics.stdev(values) / 4**0.5))
    )
    # Four copies of each query give the same interval as one.
    copies = mean_interval([1.0, 4.0, 2.5] * 4, [0, 1, 2] * 4)
    assert copies == (pytest.approx(2.5), pytest.approx(mean_interval([1.0, 4.0, 2.5])[1]))


def test_distinct_interval_of_an_odd_number_of_clusters():
    """Halves of three clusters (here texts) are rounded up to two, so this is a delete-one jackknife."""
    values = [2 / 3, 4 / 5, 1.0]  # without "b", without "c d e", without "a a"
    mean = statistics.fmean(values)
    standard_error = math.sqrt(2 / 3 * sum((value - mean) ** 2 for value in values))
    _, half = distinct_interval(["a a", "b", "c d e"], 1)
    assert half == pytest.approx(4.302653 * standard_error, rel=0.05)


def test_distinct_interval_keeps_the_texts_of_a_query_together():
    texts = [f"w{i % 7} w{i % 5} w{i % 11}" for i in range(100)]
    assert distinct_interval(texts, 2, range(100)) == distinct_interval(texts, 2)
    # One query has 50 equal texts. Half of the texts include some of these; half of the queries include all or none.
    texts = ["same words"] * 50 + [f"{i} {i}" for i in range(50)]
    queries = ["q"] * 50 + list(range(50))
    assert distinct_interval(texts, 2, queries)[1] > 2 * distinct_interval(texts, 2)[1]
    assert distinct_interval(texts, 2, ["q"] * 100)[1] is None
