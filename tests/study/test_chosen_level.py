"""KL at the level that a rule chooses from the first seeds; frontiers; tables without rows."""

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

LEVELS = (0.9, 1.0, 1.1, 1.2)


def reader(seed, k, role):
    """Task reward rises by 0.02 an iteration: to 1.18, but for the sixth seed. Log KL is twice the task reward."""
    start = 0.4 if role == "observer" else 0.0
    reward = start + 0.02 * k - 0.5 * (seed == 5)
    return reward, math.exp(2 * reward), 1.0


def partner(seed, k, role):
    """The same with half the KL, from 0 on."""
    reward = 0.03 * k - 0.5 * (seed == 5)
    return reward, 0.5 * math.exp(2 * reward), 1.0


@pytest.fixture
def study():
    groups = {"PPO": reader, "reader": reader, "partner": partner}
    return make_study(groups, roles=("pioneer", "observer"), seeds=6)


def test_the_level_is_the_highest_that_the_first_seeds_reach(study):
    first = study.of_seeds(range(5))
    names = ("reader", "partner")
    assert chosen_level(first, names, "observer", LEVELS) == 1.1
    assert chosen_level(first, names, "observer", [1.3, 1.5]) is None
    # The reader's observer begins at 0.4, also where others are compared.
    assert chosen_level(first, ("partner", "partner"), "observer", [0.4]) is None
    assert chosen_level(first, names, "observer", [0.3, 0.4]) is None
    assert chosen_level(first, names, "observer", [0.3, 0.41]) == 0.41
    # From 0.4 the reader comes 0.78 higher, but above 0.4 begins neither.
    assert chosen_level(first, names, "observer", [0.3, 0.7, 0.8], rise=True) == 0.7


def test_groups_are_compared_at_their_level_seed_by_seed(study):
    (row,) = at_chosen_levels(study, [("partner", "reader", "observer")], LEVELS)
    assert (row["group"], row["against"], row["role"], row["n"]) == (
        "partner", "reader", "observer", "6",
    )  # fmt: skip
    assert row["level"] == "1.1"
    # The sixth seed of the reader ends at 0.68, the partner's at 0.67.
    assert row["runs there"] == "5, 5"
    assert row["ratio there"].startswith("0.50 (0.50 to 0.50) lower")
    assert row["ratio there"].endswith("lower")
    (row,) = at_chosen_levels(study, [("partner", "reader", "observer")], [5.0])
    assert (row["level"], row["ratio there"]) == ("none", "")


def test_a_rise_is_from_the_own_start(study):
    k = np.arange(40)
    rows = study.metrics
    rows = rows[(rows["group"] == "reader") & (rows["seed"] == 0) & (rows["role"] == "observer")]
    assert len(rows) == len(k)
    # Just below 0.5, which is a point of the grid: rounding decides whether a fit reaches that point.
    level = 0.4999
    assert fitted_kl(rows, level, 9.0, rise=True) == pytest.approx(math.exp(1.8), rel=1e-3)
    assert fitted_kl(rows, level, 9.0) == pytest.approx(math.exp(1.0), rel=1e-3)
    (row,) = at_chosen_levels(study, [("partner", "reader", "observer")], [0.5], rise=True)
    # 0.5 * exp(1.0) over exp(1.8), and of the sixth seed, 0.5 lower, over exp(0.8) at 0.4 - 0.5 + 0.5.
    assert row["rise"] == "0.5"
    assert row["ratio there"].startswith(f"{0.5 * math.exp(-0.8):.2f} (")


def test_a_tick_stands_where_all_hold_together(study):
    compared = [("partner", "reader", "observer"), ("reader", "PPO", "pioneer")]
    corrected = at_chosen_levels(study, compared, LEVELS, corrected=True)
    assert corrected[0]["ratio there"].endswith("lower ✓")
    assert "✓" not in corrected[1]["ratio there"]
    plain = at_chosen_levels(study, compared, LEVELS)
    assert "✓" not in plain[0]["ratio there"]


def frontier_study():
    """PPO's points (KL, task reward): (1, 0), (3, 1). CORY's: (0.5, 0), (2, 1). Lazy's: (2, 0.4), (4, 1)."""
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


def test_a_run_is_beaten_where_a_frontier_earns_more_at_its_kl():
    rows = {(row["family"], row["ppo.init_kl_coef"]): row for row in beaten(frontier_study())}
    # At a KL of 1 CORY's line is at 1/3; at 3 its highest is 1, no more than PPO's.
    assert rows["PPO", "1"]["beaten by CORY"] == "5 of 5"
    assert rows["PPO", "2"]["beaten by CORY"] == "0 of 5"
    # At a KL of 2 PPO's line is at 0.5.
    assert rows["lazy", "1"]["beaten by PPO"] == "5 of 5"
    assert rows["CORY", "1"]["beaten by PPO"] == "0 of 5"  # PPO has no KL as low
    assert rows["CORY", "2"]["beaten by PPO"] == "0 of 5"
    assert rows["PPO", "1"]["beaten by PPO"] == ""


def test_held_out_the_kl_of_both_calls_counts():
    """In one call CORY's frontier beats PPO's first run; in two, by the KL of both, PPO's beats CORY's.

    The second runs have the highest task reward, which no frontier exceeds.
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


def test_hypervolumes_are_apart_seed_by_seed():
    study = frontier_study()
    # From the worst task reward, 0, and KL, 4: CORY's are 1 * 2, PPO's 1 * 1, of all 1 * 2.
    assert apart(study, "CORY", "PPO").value == pytest.approx(0.5)
    (row,) = frontiers_apart(study, [("CORY", "PPO")])
    assert row["hypervolume, difference"].startswith("+0.50 ")
    with pytest.raises(LookupError, match="GRPO"):
        frontiers_apart(study, [("GRPO", "PPO")])


def test_a_seed_that_lacks_a_group_is_left_out():
    """As while an experiment is under way: PPO has five seeds, the others four."""
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


def test_a_tick_of_times_to_collapse_is_corrected_for():
    """PPO collapses after 20 iterations or so, the others later or not at all."""

    def collapsing(after):
        return lambda seed, k, role: (0.0, 60.0 if k > after + seed % 2 else 1.0, 1.0)

    groups = {"PPO": collapsing(20), "late": collapsing(25), "noisy": collapsing(21)}
    rows = {row["group"]: row for row in collapses(make_study(groups), primary=["late"])}
    assert rows["late"]["difference"].endswith("higher ✓")
    assert rows["noisy"]["difference"].endswith("higher")
    with pytest.raises(LookupError, match="none"):
        collapses(make_study(groups), primary=["none"])
