"""Verdicts on the paper's claims, computed from hand-made data frames."""

import math
import random

import pandas as pd
import pytest
from handmade import make_study

from cory.errors import UserError
from results import claims, estimates
from results.estimates import CORY, NOT_TESTABLE, OPEN, PPO, Untested, end, over, prepared
from study.frame import BASE, LIMIT
from study.frontier import apart
from study.intervals import Interval, difference, ratio

ROLES = ("pioneer", "observer")


def rising(factor, distinct=1.0):
    """In iteration k, the reward is 0.1 * k, and 1 more for the observer; the KL is `factor` * (1 + seed) * k."""

    def values(seed, k, role):
        return 0.1 * k + (role == "observer"), factor * (1 + seed) * k, distinct if k else 1.0

    return values


def direction(low, high, *holds, n=5):
    return claims.direction(Interval((low + high) / 2, low, high, n), holds)


def test_a_direction_is_decided_by_where_the_interval_lies():
    assert direction(1.1, 3, *claims.MORE) == "yes"
    assert direction(0.9, 3, *claims.MORE) == "open"
    assert direction(0.5, 1, *claims.MORE) == "no"
    assert direction(-0.1, 0.1, -0.2, 0.2) == "yes"
    assert direction(-0.3, 0.1, -0.2, 0.2) == "open"
    assert direction(0.3, 0.4, -0.2, 0.2) == "no"
    assert direction(1.1, 3, *claims.MORE, n=4) == "open"
    assert direction(math.nan, math.nan, *claims.MORE) == "open"


def test_estimates_of_the_curves():
    """Expected values follow from 40 iterations. The mean of k is 4.5 in the first ten and 34.5 in the last ten."""
    raw_study = make_study({PPO: rising(6.0), CORY: rising(1.0)}, roles=ROLES)
    raw_study.runs[LIMIT] = 18
    study = prepared(raw_study)
    e = estimates
    values = {
        6.0: e.between(PPO, CORY, end("kl"), ratio),
        # The mean reward of CORY's agents is 0.5 above that of PPO, whose gain is 3.45.
        0.5 / 3.45: e.relative(CORY, PPO, end("task_reward"), e.gain),
        1 / 3.95: e.measured(CORY, over(e.distance_of_agents, e.gain)),
        -1.5: e.measured(PPO, e.decline),
        1.95 / 3.95: e.measured(CORY, over(e.early_gain, e.gain)),
        10 / 34.5: e.measured(PPO, over(e.late_growth, end("kl"))),
        0.5: e.measured(PPO, e.share_of_limit),
        # The reward rises by 3. The KL, with a coefficient of 0.3, rises by 30 * (1 + seed), on average 30 * 3.
        3 - 0.3 * 30 * 3: e.measured(CORY, e.rise),
        # PPO collapses after 14, 10, 10, 10, 10 iterations; CORY after 31, 23, 19, 16 and not in the first seed.
        25.8 - 10.8: e.between(CORY, PPO, e.time_to_collapse, difference),
        -0.2: e.relative(CORY, PPO, e.collapsed, e.collapsed),
    }
    for expected, estimate in values.items():
        interval = estimate(study)
        assert interval.value == pytest.approx(expected, rel=1e-6) and interval.n == 5
    with pytest.raises(Untested):
        e.measured("GRPO", e.gain)(study)
    assert e.measured(CORY, e.gain)(study).low == pytest.approx(3.95)  # equal in all seeds


def test_agents_with_fixed_roles_are_compared():
    """The observer's KL is twice the pioneer's, so the expected ratio is 0.5."""

    def fixed(seed, k, role):
        return 1.0, 1.0 + seed + (1.0 + seed) * (role == "observer"), 1.0

    study = prepared(make_study({CORY: fixed}, roles=ROLES))
    assert estimates.of_fixed_roles(CORY, end("kl"))(study).value == pytest.approx(0.5)


def test_a_share_of_a_gain_that_may_be_0_has_no_interval():
    def loses(seed, k, role):
        return (-1.0 if k and seed == 0 else 0.1 * k), 1.0, 1.0

    study = prepared(make_study({CORY: loses}, roles=ROLES))
    settled = over(estimates.early_gain, estimates.gain)
    assert math.isnan(estimates.measured(CORY, settled)(study).low)


def test_a_share_of_a_rival_below_0_is_open():
    study = prepared(make_study({PPO: lambda *_: (-1.0, 0.0, 1.0), CORY: rising(0.0)}))
    relative_reward = estimates.relative(CORY, PPO, end("combined_reward"), end("combined_reward"))
    with pytest.raises(Untested) as untested:
        relative_reward(study)
    assert untested.value.args[0] == OPEN


def test_a_claim_about_collapse_is_not_testable_without_a_collapse():
    """Distinct-2 falls from 1 to 0.4 in all PPO runs and one of five CORY runs. In the second study, it never falls."""

    def cory(seed, k, role):
        return 1.0, 1.0, (0.4 if k and seed == 0 else 1.0)

    texts = estimates.provided(
        claims.ppo_collapses,
        "none",
        estimates.between(PPO, CORY, estimates.texts_collapsed, difference),
    )
    study = prepared(make_study({PPO: rising(0.0, distinct=0.4), CORY: cory}, roles=ROLES))
    assert texts(study).value == pytest.approx(0.8)
    calm = prepared(make_study({PPO: rising(0.0), CORY: rising(0.0)}, roles=ROLES))
    with pytest.raises(Untested) as untested:
        texts(calm)
    assert untested.value.args == (NOT_TESTABLE, "none")


def test_frontiers_and_values_are_compared_seed_by_seed():
    points = {"PPO 1": (1, 6), "PPO 10": (2, 9), "CORY 1": (1, 1), "CORY 10": (4, 2)}
    raw_study = make_study(
        {
            name: lambda seed, k, role, point=point: (
                point[0] + seed,
                point[1] * (1 + k / 40),
                1.0,
            )
            for name, point in points.items()
        }
    )
    raw_study.runs[["family", "value"]] = (
        raw_study.runs["group"].str.split(" ", expand=True).to_numpy()
    )
    study = prepared(raw_study)
    assert estimates.values_of(study) == ["1", "10"]
    mean_rewards = estimates.by_seed(study, PPO, end("task_reward"))
    assert mean_rewards.tolist() == pytest.approx([1.5 + seed for seed in range(5)])
    assert apart(study, CORY, PPO).value == pytest.approx(1.0, abs=0.2)
    second, first = 34.5 - 19.5, 40 + 19.5
    assert estimates.kl_accelerates(study).value == pytest.approx(second / first)


def test_pass_at_k_is_above_at_every_k_if_all_intervals_are():
    study = make_study({PPO: rising(1.0), CORY: rising(1.0)})
    rows = [(BASE, None, "base", "base", 1, 0.3, 0.5)]
    for seed in range(5):
        rows.append((PPO, seed, "agent_1", "agent_1", 1, 0.5, 0.5))
        for agent, p in (("agent_1", 0.4), ("agent_2", 0.5)):
            rows.append((CORY, seed, agent, agent, 1, p, p))
        rows.append((CORY, seed, "agent_2 after agent_1", "agent_2", 2, 0.9, 0.9))
    columns = ["group", "seed", "answers", "agent", "calls", "pass@1", "pass@2"]
    study.held_out = pd.DataFrame(rows, columns=columns)
    assert estimates.passes(BASE)(study).value == pytest.approx(-0.05)
    assert estimates.passes(PPO)(study)[:2] == pytest.approx((-0.05, -0.05))
    assert estimates.alone(study).value == pytest.approx(-0.05)  # by pass@1


def test_two_agents_as_noisy_as_one_have_the_same_spread():
    """The mean of two agents' rewards would have a smaller spread."""
    noise = random.Random(0)
    rows = [
        {"iteration": k, "role": ROLES[(agent + k // 5) % 2], "task_reward": noise.choice([-1.0, 1.0])}
        for k in range(4000)
        for agent in range(2)
    ]  # fmt: skip
    run = pd.DataFrame(rows)
    one = estimates.spread(run[run["role"] == "pioneer"])
    # A value of variance 1, minus the mean of 10 values that include this value, has variance 0.9.
    assert one == pytest.approx(0.9**0.5, abs=0.02)
    assert estimates.spread(run) == pytest.approx(one, abs=0.02)


def test_a_table_has_a_row_for_each_setting():
    """PPO's KL is six times CORY's in all seeds. The study has no runs with a larger model."""

    def kl(value):
        return lambda seed, k, role: (0.1 * k, value, 1.0)

    study = prepared(make_study({PPO: kl(6.0), CORY: kl(1.0)}, roles=ROLES, iterations=20))
    folders = ("imdb_stability", "gsm8k_credit")
    higher, larger = (
        claims.Claim(
            name, "KL", "2", claims.MORE, folders, estimates.between(name, CORY, end("kl"), ratio)
        )
        for name in (PPO, "PPO, larger model")
    )
    rows = claims.table(claims.Part("E1", "IMDB", [higher, larger]), dict.fromkeys(folders, study))
    assert [row["claim"] for row in rows] == [PPO, "", "PPO, larger model", ""]
    assert [row["the paper's task"] for row in rows] == ["yes", "no"] * 2
    assert [row["direction"] for row in rows] == ["yes", "yes", "not run", "not run"]
    assert [row["here"] for row in rows] == ["6.00 (6.00 to 6.00)"] * 2 + [""] * 2
    assert rows[0]["n"] == "5" and rows[0]["reported"] == "2"


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match="imdb_partner_full_kl"):
        claims.command_line(["--results", str(tmp_path)])
