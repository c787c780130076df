"""The KL at a level of task reward that is chosen from the first seeds; frontiers of reward and KL; empty tables."""

import math

import numpy as np
import pandas as pd
import pytest
from handmade import make_study

from cory.errors import UserError
from study import tables
from study.collapse import collapses
from study.equal_reward import at_chosen_levels, chosen_level
from study.frontier import apart, beaten, frontiers_apart
from study.readings import fitted_kl

LEVELS = (0.9, 1.0, 1.1, 1.2)  # task rewards


def reader(seed, k, role):
    """Task reward rises by 0.02 an iteration; the observer's ends at 1.18. In the sixth seed, it is 0.5 lower.

    The log of the KL is twice the task reward.
    """
    start = 0.4 if role == "observer" else 0.0
    reward = start + 0.02 * k - 0.5 * (seed == 5)
    return reward, math.exp(2 * reward), 1.0


def partner(seed, k, role):
    """Task reward rises from 0 by 0.03 an iteration. At equal task reward, the KL is half of `reader`'s."""
    reward = 0.03 * k - 0.5 * (seed == 5)
    return reward, 0.5 * math.exp(2 * reward), 1.0


@pytest.fixture
def study():
    groups = {"PPO": reader, "reader": reader, "partner": partner}
    return make_study(groups, roles=("pioneer", "observer"), seeds=6)


def test_the_level_is_the_highest_that_the_first_seeds_reach(study):
    names = ("reader", "partner")
    assert chosen_level(study, names, "observer", LEVELS) == 1.1
    assert chosen_level(study, names, "observer", [1.3, 1.5]) is None
    # A level must be above the task reward at which each group starts, even a group that is not compared.
    # The reader's observer starts at 0.4.
    assert chosen_level(study, ("partner", "partner"), "observer", [0.4]) is None
    assert chosen_level(study, names, "observer", [0.3, 0.4]) is None
    assert chosen_level(study, names, "observer", [0.3, 0.41]) == 0.41
    # With `rise`, a level is an increase since the group's start. The reader's reward rises by 0.78, so
    # it reaches 0.7 but not 0.8.
    assert chosen_level(study, names, "observer", [0.3, 0.7, 0.8], rise=True) == 0.7


def test_groups_are_compared_at_their_level_seed_by_seed(study):
    (row,) = at_chosen_levels(study, [("partner", "reader", "observer")], LEVELS)
    assert (row["group"], row["against"], row["role"], row["n"]) == (
        "partner", "reader", "observer", "6",
    )  # fmt: skip
    assert row["level"] == "1.1"
    # The sixth seed does not reach the level: it ends at 0.68 (reader) and 0.67 (partner).
    assert row["runs there"] == "5, 5"
    assert row["ratio there"].startswith("0.50 (0.50 to 0.50) lower")
    assert row["ratio there"].endswith("lower")
    (row,) = at_chosen_levels(study, [("partner", "reader", "observer")], [5.0])
    assert (row["level"], row["ratio there"]) == ("none", "")


def test_a_rise_is_measured_from_a_groups_own_start(study):
    k = np.arange(40)
    rows = study.metrics
    rows = rows[(rows["group"] == "reader") & (rows["seed"] == 0) & (rows["role"] == "observer")]
    assert len(rows) == len(k)
    # Not 0.5 itself: there, rounding would decide whether a fit reaches the level.
    level = 0.4999
    assert fitted_kl(rows, level, 9.0, rise=True) == pytest.approx(math.exp(1.8), rel=1e-3)
    assert fitted_kl(rows, level, 9.0) == pytest.approx(math.exp(1.0), rel=1e-3)
    (row,) = at_chosen_levels(study, [("partner", "reader", "observer")], [0.5], rise=True)
    # The partner's KL is 0.5 * exp(1.0), the reader's exp(1.8). In the sixth seed, both start 0.5 lower.
    assert row["rise"] == "0.5"
    assert row["ratio there"].startswith(f"{0.5 * math.exp(-0.8):.2f} (")


def test_a_tick_marks_differences_that_hold_after_holms_correction(study):
    compared = [("partner", "reader", "observer"), ("reader", "PPO", "pioneer")]
    corrected = at_chosen_levels(study, compared, LEVELS, corrected=True)
    assert corrected[0]["ratio there"].endswith("lower ✓")
    assert "✓" not in corrected[1]["ratio there"]
    plain = at_chosen_levels(study, compared, LEVELS)
    assert "✓" not in plain[0]["ratio there"]


def frontier_study():
    """Returns a study of three families, each at two values of eta; `points` contains their task reward and KL."""
    points = {
        "PPO, eta 1": (0.0, 1.0),
        "PPO, eta 2": (1.0, 3.0),
        "CORY, eta 1": (0.0, 0.5),
        "CORY, eta 2": (1.0, 2.0),
        "lazy, eta 1": (0.4, 2.0),
        "lazy, eta 2": (1.0, 4.0),
    }

    def values(name):
        reward, kl = points[name]
        return lambda seed, k, role: (reward, kl, 1.0)

    study = make_study({name: values(name) for name in points}, seeds=5, iterations=12)
    family, _, value = zip(*(name.partition(", eta ") for name in study.runs["group"]), strict=True)
    study.runs = study.runs.assign(family=family, value=value, over="ppo.init_kl_coef")
    return study


def test_a_run_is_beaten_if_another_frontier_earns_more_at_its_kl():
    rows = {(row["family"], row["ppo.init_kl_coef"]): row for row in beaten(frontier_study())}
    # CORY's frontier has a reward of 1/3 at KL 1 and a reward of 1 at KL 3. PPO also has a reward of 1 at KL 3.
    assert rows["PPO", "1"]["beaten by CORY"] == "5 of 5"
    assert rows["PPO", "2"]["beaten by CORY"] == "0 of 5"
    # PPO's frontier has a reward of 0.5 at a KL of 2.
    assert rows["lazy", "1"]["beaten by PPO"] == "5 of 5"
    assert rows["CORY", "1"]["beaten by PPO"] == "0 of 5"  # no PPO run has so low a KL
    assert rows["CORY", "2"]["beaten by PPO"] == "0 of 5"
    assert rows["PPO", "1"]["beaten by PPO"] == ""


def test_held_out_frontiers_use_the_kl_of_all_calls():
    """If agent_1 answers once (one call), CORY's frontier beats PPO's runs at eta 1.

    If it answers again after itself (two calls), CORY's KL is larger, and PPO's frontier beats CORY's runs at eta 1.

    No frontier exceeds the task reward of the runs at eta 2.
    """
    study = frontier_study()
    names = [name for name in study.groups if not name.startswith("lazy")]
    points = {("PPO", 1): 1.0, ("CORY", 1): 0.5, ("PPO", 2): 1.0, ("CORY", 2): 2.0}
    study.held_out = pd.DataFrame(
        {
            "group": name,
            "seed": seed,
            "answers": "agent_1" if calls == 1 else "agent_1 after itself",
            "agent": "agent_1",
            "calls": calls,
            "task_reward": float(name[-1]),
            "kl": 0.1,
            "chain_kl": float(name[-1]) * points[name.partition(",")[0], calls],
        }
        for name in names
        for seed in range(5)
        for calls in (1, 2)
    ).astype({"seed": "Int64"})
    once, twice = (beaten(study, calls) for calls in (1, 2))
    assert [row["beaten by CORY"] for row in once] == ["5 of 5", "0 of 5", "", ""]
    assert [row["beaten by PPO"] for row in twice] == ["", "", "5 of 5", "0 of 5"]
    with pytest.raises(LookupError, match="3"):
        beaten(study, 3)


def test_hypervolumes_are_compared_seed_by_seed():
    study = frontier_study()
    # From the reference point (task reward 0, KL 4), the hypervolume is 1 * 2 for CORY and 1 * 1 for PPO.
    # It is given as a share of 1 * 2, the hypervolume of all runs.
    assert apart(study, "CORY", "PPO").value == pytest.approx(0.5)
    (row,) = frontiers_apart(study, [("CORY", "PPO")])
    assert row["hypervolume, difference"].startswith("+0.50 ")
    with pytest.raises(LookupError, match="GRPO"):
        frontiers_apart(study, [("GRPO", "PPO")])


def test_a_seed_without_runs_of_all_groups_is_left_out():
    """In an unfinished experiment, PPO has five seeds and the others four."""
    study = frontier_study()
    half_made = (study.final["seed"] == 4) & ~study.final["group"].str.startswith("PPO")
    study.final = study.final[~half_made]
    whole = apart(study, "CORY", "PPO")
    assert (whole.n, whole.value) == (4, pytest.approx(0.5))
    assert beaten(study)[0]["beaten by CORY"] == "4 of 4"


def test_a_table_without_rows_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "configs/experiments").mkdir(parents=True)
    (tmp_path / "configs/experiments/trial.yaml").write_text(
        "{title: t, question: q, runs: {a: {script: cory.train}},"
        " scales: {full_kl: {config: c.yaml, seeds: [0]}}}"
    )
    for folder in ("trial", "trial_full_kl"):
        assert tables.table(f"held_out {folder}") == "Not run yet.\n"
    for folder in ("other", "trial_full_kll"):
        with pytest.raises(UserError):
            tables.table(f"held_out {folder}")


def test_only_primary_comparisons_of_times_to_collapse_get_a_tick():
    """PPO collapses after about 20 iterations, the other groups later."""

    def collapsing(after):
        return lambda seed, k, role: (0.0, 60.0 if k > after + seed % 2 else 1.0, 1.0)

    groups = {"PPO": collapsing(20), "late": collapsing(25), "noisy": collapsing(21)}
    rows = {row["group"]: row for row in collapses(make_study(groups), primary=["late"])}
    assert rows["late"]["difference"].endswith("higher ✓")
    assert rows["noisy"]["difference"].endswith("higher")
    with pytest.raises(LookupError, match="none"):
        collapses(make_study(groups), primary=["none"])
