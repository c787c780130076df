"""The KL at which the fitted task reward reaches a level, on runs whose task reward and KL are known functions."""

import numpy as np
import pandas as pd
import pytest
from handmade import held, make_study

from study.equal_reward import at_all_readings, primary
from study.frame import LIMIT, SHORTEST
from study.method import against_one_agent
from study.readings import first_passage_kl, fitted_kl, monotone_kl

LENGTHS = np.random.default_rng(0).uniform(4, 14, 100)  # mean response length by iteration


def reward_at(k, length):
    """Returns the task reward: 1 at iteration 60 and length 9. Each further token earns 0.2 more."""
    t = k / 100
    return 2 * t - 0.2 - t * (t - 0.6) * (1 - t**2) + 0.2 * (length - 9)


def kl_at(k, length):
    """Returns the KL: exp(-3 + 3.6) = 1.822 at iteration 60 and length 9. Longer responses have a higher KL."""
    return np.exp(-3 + 6 * k / 100 + 0.1 * (length - 9))


def run_of(kl=kl_at):
    k = np.arange(100)
    return pd.DataFrame(
        {
            "iteration": k,
            "task_reward": reward_at(k, LENGTHS),
            "kl": kl(k, LENGTHS),
            "response_tokens": LENGTHS,
        }
    )


def test_the_fit_finds_the_kl_at_a_given_length():
    """The first iteration's KL is 0, because nothing was trained yet. It does not disturb the fit."""
    rows = run_of()
    rows.loc[0, "kl"] = 0.0
    assert fitted_kl(rows, 1.0, 9.0) == pytest.approx(np.exp(0.6), rel=1e-6)
    # At length 10, the level is reached where the task reward at length 9 is 0.8.
    k = np.arange(0, 99.05, 0.1)
    first = k[(reward_at(k, 10.0) >= 1.0).argmax()]
    assert fitted_kl(rows, 1.0, 10.0) == pytest.approx(kl_at(first, 10.0), rel=1e-6)


def test_a_run_without_the_level_without_kl_or_with_few_iterations_has_no_fitted_kl():
    assert np.isnan(fitted_kl(run_of(), 5.0, 9.0))
    assert np.isnan(fitted_kl(run_of(lambda k, length: 0 * k), 1.0, 9.0))
    assert np.isnan(fitted_kl(run_of().head(5), 0.0, 9.0))


def test_a_monotone_fit_gives_the_same_kl_at_the_same_length():
    """The monotone fit has a step per iteration, so its KL may be too high by a factor of exp(0.06)."""
    rows = run_of()
    assert monotone_kl(rows, 1.0, 9.0) == pytest.approx(np.exp(0.6), rel=0.07)
    assert np.isnan(monotone_kl(rows, 5.0, 9.0))
    # A dip after the level was reached changes only later steps of the fit.
    dipped = rows.assign(task_reward=rows["task_reward"] - 0.5 * (rows["iteration"] > 90))
    assert monotone_kl(dipped, 0.2, 9.0) == pytest.approx(monotone_kl(rows, 0.2, 9.0), rel=0.1)


def test_with_a_fixed_length_limit_the_fit_ignores_lengths():
    """The reward then depends only on the iteration, whatever lengths responses have."""
    rows = run_of().assign(
        task_reward=reward_at(np.arange(100), 9.0), kl=kl_at(np.arange(100), 9.0)
    )
    for reading in (fitted_kl, monotone_kl):
        assert reading(rows, 1.0, None) == pytest.approx(np.exp(0.6), rel=0.07)


def test_first_passage_uses_a_mean_over_ten_iterations():
    k = np.arange(30)
    rows = pd.DataFrame({"iteration": k, "task_reward": k / 10, "kl": 2.0 * k})
    # Iterations 6 to 15 are the first ten whose mean reward, 1.05, is at least 1. Their mean KL is 2 * 10.5.
    assert first_passage_kl(rows, 1.0) == 2 * 10.5
    assert np.isnan(first_passage_kl(rows, 2.6))


def study_of_two(seeds=5):
    """Returns a study of PPO and CORY. CORY's pioneer has twice PPO's KL, and CORY's observer half of PPO's.

    CORY's agents swap roles every iteration. The task reward of CORY's last seed never reaches 1.
    """

    def ppo(seed, k, role):
        return reward_at(k, 9.0), (1 + seed) * kl_at(k, 9.0), 1.0

    def cory(seed, k, role):
        reward, kl, distinct = ppo(seed, k, role)
        factor = 2.0 if role == "pioneer" else 0.5
        return reward - (seed == seeds - 1), factor * kl, distinct

    roles = ("pioneer", "observer")
    study = make_study({"PPO": ppo, "CORY": cory}, roles=roles, seeds=seeds, iterations=100)
    swapped = study.metrics["agent"].map({"agent_1": "agent_2", "agent_2": "agent_1"})
    swaps = (study.metrics["iteration"] % 2 == 1) & (study.metrics["group"] == "CORY")
    study.metrics["agent"] = study.metrics["agent"].where(~swaps, swapped)
    return study


def test_a_pair_is_compared_over_all_roles_and_in_one_role():
    """Over all roles, an agent's KL alternates between twice and half of PPO's, so its mean log KL equals PPO's."""
    study = study_of_two()
    in_any, as_pioneer = primary(study, [("CORY", "PPO")], [1.0], [("any", "ratio at 1")])
    assert (in_any["role"], as_pioneer["role"]) == ("any", "pioneer")
    assert in_any["runs at 1"] == as_pioneer["runs at 1"] == "4, 5"
    assert in_any["n"] == "5"
    # PPO's KL at the level is 1.822 times 1, 2, 3 and 4 in the first four seeds. CORY's fifth never reaches the level.
    assert as_pioneer["KL at 1"] == "8.07, 4.03"
    assert as_pioneer["ratio at 1"].startswith("2.00 (2.00 to 2.00)")
    assert float(in_any["ratio at 1"].split()[0]) == pytest.approx(1.0, abs=0.1)
    end = reward_at(np.arange(90, 100), 9.0).mean()
    # In one of CORY's five seeds, the task reward is 1 lower.
    assert in_any["task reward"] == f"{end - 0.2:.2f}, {end:.2f}"
    assert in_any["difference"].startswith("-0.20 (")
    # At the end, CORY's mean KL is 1.25 times PPO's, since its roles have 2 and 0.5 times PPO's KL.
    assert in_any["ratio"].startswith("1.25 (1.25 to 1.25)")
    assert as_pioneer["ratio"].startswith("2.00 (2.00 to 2.00)")
    # PPO has no observer, so CORY's observer is compared with PPO's only role, whose KL is twice as high.
    (observer,) = primary(
        study, [("CORY", "PPO")], [1.0], [("observer", "ratio")], roles=["observer"]
    )
    assert observer["role"] == "observer" and observer["n"] == "5"
    assert observer["ratio"].startswith("0.50 (0.50 to 0.50)")


def test_a_frozen_agent_does_not_count_in_a_comparison_over_all_roles():
    """The frozen pioneer earns nothing and has a KL of 0. The observer has PPO's task reward and half its KL."""

    def ppo(seed, k, role):
        return reward_at(k, 9.0), kl_at(k, 9.0), 1.0

    def reader(seed, k, role):
        reward, kl, distinct = ppo(seed, k, role)
        return (0.0, 0.0, distinct) if role == "pioneer" else (reward, kl / 2, distinct)

    study = make_study(
        {"PPO": ppo, "reader": reader}, roles=("pioneer", "observer"), iterations=100
    )
    (row,) = primary(study, [("reader", "PPO")], [1.0], [("any", "ratio")], roles=["any"])
    assert row["difference"].startswith("+0.00")
    assert row["runs at 1"] == "5, 5"
    assert row["ratio"].startswith("0.50") and row["ratio at 1"].startswith("0.50")


def test_a_group_with_short_responses_does_not_change_the_kl_of_other_groups():
    def ppo(seed, k, role):
        return reward_at(k, LENGTHS[k]), (1 + seed) * kl_at(k, LENGTHS[k]), 1.0

    groups = {"PPO": ppo, "CORY": ppo, "short": ppo}
    study = make_study(groups, iterations=100)
    study.metrics["response_tokens"] = LENGTHS[study.metrics["iteration"]]
    study.runs[[SHORTEST, LIMIT]] = ["4", "16"]
    (before,) = primary(study, [("CORY", "PPO")], [1.0], [], roles=["any"])
    study.metrics.loc[study.metrics["group"] == "short", "response_tokens"] /= 4
    (after,) = primary(study, [("CORY", "PPO")], [1.0], [], roles=["any"])
    assert before == after
    first = np.arange(0, 99.05, 0.1)[(reward_at(np.arange(0, 99.05, 0.1), 10.0) >= 1).argmax()]
    assert float(after["KL at 1"].split(",")[0]) == pytest.approx(
        kl_at(first, 10.0) * np.prod(np.arange(1, 6)) ** 0.2, abs=0.01
    )


def test_a_verdict_is_fragile_if_another_way_to_read_the_kl_disagrees():
    """The reward reaches the level early, in a spike of ten iterations with a high KL.

    A fit to all iterations ignores the spike.
    """

    def ppo(seed, k, role):
        return k / 40, (1 + 0.01 * seed) * (1.0 + k / 40), 1.0

    def half(seed, k, role):
        reward, kl, distinct = ppo(seed, k, role)
        return reward, kl / 2, distinct

    def spiked(seed, k, role):
        """Like `half`, with a spike of ten iterations."""
        reward, kl, distinct = half(seed, k, role)
        return (reward + 1.0, 9.0, distinct) if 0 < k < 11 else (reward, kl, distinct)

    study = make_study({"PPO": ppo, "half": half, "spiked": spiked}, iterations=60)
    rows = at_all_readings(study, [("half", "PPO", "any"), ("spiked", "PPO", "any")], [1.0])
    assert rows[0]["verdict"] == "lower" and rows[0]["level"] == "1"
    assert rows[0]["fit"].startswith("0.50 (")
    assert rows[1]["first passage"].endswith("higher")
    assert rows[1]["verdict"].endswith(", fragile")


def test_cory_is_compared_with_one_agent_in_one_row():
    """CORY has PPO's task reward in both roles. Its KL equals PPO's as pioneer and is half of it as observer."""

    def ppo(seed, k, role):
        return k / 40, (1 + 0.01 * seed) * (1.0 + k / 40), 1.0

    def cory(seed, k, role):
        reward, kl, distinct = ppo(seed, k, role)
        return reward, kl * (0.5 if role == "observer" else 1.0), distinct

    study = make_study({"PPO": ppo, "CORY": cory}, roles=("pioneer", "observer"), iterations=60)
    (row,) = against_one_agent(study, ["missing", "CORY"], "PPO", [0.5, 1.0])
    # Half of the KL is saved in one of two roles, at a KL coefficient of 0.3.
    ahead = 0.3 * 0.25 * 1.02 * (1.0 + 54.5 / 40)
    assert (
        row["combined reward"].startswith(f"{ahead:+.2f} (")
        and "higher ✓" in row["combined reward"]
    )
    assert row["as pioneer"].startswith("+0.00")
    assert row["level"] == "1"
    assert row["KL there, ratio"].startswith("0.71 (")  # the geometric mean of 1 and 0.5
    assert row["two calls - PPO once, both KLs"] == ""
    with pytest.raises(LookupError):
        against_one_agent(study, ["missing"], "PPO", [0.5])


def test_a_cell_names_the_number_of_evaluated_seeds_if_it_is_smaller():
    study = make_study(dict.fromkeys(["PPO", "CORY"], lambda *_: (1.0, 1.0, 1.0)))
    rows = [("PPO", seed, "agent_1", 1, 1.0, 0.0, 0.0) for seed in range(5)]
    rows += [("CORY", seed, "agent_2 after agent_1", 2, 4.0, 1.0, 2.0) for seed in range(5)]
    column = "two calls - PPO once, both KLs"
    (row,) = against_one_agent(held(study, rows), ["CORY"], "PPO", [0.5])
    assert row["n"] == "5" and row[column] == "+2.40 (+2.40 to +2.40) higher"  # 3 - 0.3 * 2
    (row,) = against_one_agent(held(study, rows[:-1]), ["CORY"], "PPO", [0.5])
    assert row["n"] == "5" and row[column] == "+2.40 (+2.40 to +2.40), n = 4"


def test_only_primary_comparisons_are_corrected_and_ticked():
    study = study_of_two(seeds=8)
    compared = [("CORY", "PPO"), ("CORY", "PPO")]
    rows = primary(study, compared, [1.0], [("any", "ratio"), ("pioneer", "ratio at 1")])
    ticked = [(row["role"], title) for row in rows for title in row if row[title].endswith("✓")]
    assert ticked == [("any", "ratio"), ("pioneer", "ratio at 1")] * 2
    assert rows[1]["ratio"].endswith("higher")


def test_a_primary_comparison_outside_the_table_is_refused():
    for wrong in [("any", "ratio at 2"), ("observer", "ratio"), ("any", "KL")]:
        with pytest.raises(LookupError, match="no primary"):
            primary(study_of_two(), [("CORY", "PPO")], [1.0], [wrong])
