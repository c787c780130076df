"""The KL at equal task reward and the time to collapse, on hand-worked cases."""

import json

import numpy as np
import pandas as pd
import pytest
import yaml
from handmade import compared, make_study
from written import write_run as make_run

from study.collapse import collapse_times, collapses
from study.comparison import ends
from study.equal_reward import common_levels, kl_at, running_means
from study.frame import LIMIT, SHORTEST, assemble, read_study, write_study


def test_the_kl_is_averaged_over_the_first_ten_iterations_that_reach_the_level():
    """The task reward is k / 10, with a mean of 0.45 in iterations 0 to 9 and 0.55 in 1 to 10. The KL is k."""
    study = make_study({"PPO": lambda seed, k, role: (k / 10, k, 1.0)}, seeds=2)
    means = running_means(study, "pioneer")
    assert kl_at(means, 0.5).to_dict() == {
        ("PPO", 0): pytest.approx(5.5),
        ("PPO", 1): pytest.approx(5.5),
    }
    assert not len(kl_at(means, 4.0))  # the last ten iterations have a mean of 3.45


def test_levels_are_reached_by_nine_in_ten_runs_of_every_group():
    """Nine of PPO's ten runs end at 1.1 and one at 0.3. Eight of CORY's end at 0.8 and two at 0.6."""

    def ppo(seed, k, role):
        return (0.1 if k < 20 else 0.3 if seed == 0 else 1.1), 0.0, 1.0

    def cory(seed, k, role):
        return (0.1 if k < 20 else 0.6 if seed < 2 else 0.8), 0.0, 1.0

    levels = common_levels(
        running_means(make_study({"PPO": ppo, "CORY": cory}, seeds=10), "pioneer"), 0.25
    )
    assert levels == [0.25, 0.5]
    alone = common_levels(running_means(make_study({"PPO": ppo}, seeds=10), "pioneer"), 0.25)
    assert alone == [0.25, 0.5, 0.75, 1.0]  # reached by 9 of 10
    high = common_levels(
        running_means(make_study({"PPO": lambda s, k, r: (0.6, 0.0, 1.0)}), "pioneer"), 0.25
    )
    assert high == []  # runs start above 0.25 and 0.5
    short = make_study({"PPO": ppo}, iterations=9)
    assert common_levels(running_means(short, "pioneer"), 0.25) == []


def test_collapse_is_judged_by_an_agents_mean_over_ten_iterations():
    """Distinct-2 falls from 1 to 0.2 after iteration 15. In iteration 22, the mean over the last ten is 0.44."""

    def ppo(seed, k, role):
        return 1.0, 1.0, (0.2 if k > 15 and seed < 3 else 1.0)

    def cory(seed, k, role):
        return 1.0, (90.0 if role == "observer" and k >= 30 else 1.0), 1.0

    study = make_study({"PPO": ppo, "CORY": cory}, roles=("pioneer", "observer"))
    times = collapse_times(study)
    texts, kl = times["texts"], times["kl"]
    assert texts["PPO"].dropna().tolist() == [23, 23, 23] and kl["PPO"].isna().all()
    # The observer's KL is 90 in 6 of ten iterations, which gives a mean of 54.4.
    assert kl["CORY"].tolist() == [36] * 5 and texts["CORY"].isna().all()
    rows = collapses(study)
    assert [row["collapsed"] for row in rows] == ["3 of 5", "5 of 5"]
    assert [row["collapsed"] for row in ends(study)] == ["3 of 5", "5 of 5"]
    assert [(row["by KL"], row["by distinct-2"]) for row in rows] == [("0", "3"), ("5", "0")]
    assert rows[0]["mean of min(T, 40)"].startswith("29.8 ± ")
    assert rows[1]["difference"].startswith("+6.2 (")


def stopped(folder, guard):
    """Rewrites a run's files as if a guard had ended it before the end of 30 planned iterations."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"iterations": 30}))
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"stopped": True, "stopped_by": guard}
    (folder / "summary.json").write_text(json.dumps(summary))


def test_a_run_that_a_guard_ends_above_the_kl_bound_has_collapsed(tmp_path):
    """Seed 0 has collapsed although the mean KL of its last ten iterations is below the bound.

    Seed 1 was ended by a guard below the bound, and no guard ended seed 2, so they have not collapsed.
    """
    make_run(tmp_path / "run-seed2", seed=2, iterations=30)
    for seed in range(2):
        folder = make_run(tmp_path / f"run-seed{seed}", seed=seed, iterations=12)
        stopped(folder, "guards.stop_at_kl")
    for seed in (0, 2):
        file = tmp_path / f"run-seed{seed}/metrics.jsonl"
        *before, last = file.read_text().splitlines()
        last = json.dumps(json.loads(last) | {"kl": 60.0})
        file.write_text("\n".join([*before, last, ""]))

    study = compared(tmp_path)
    write_study(study, tmp_path)
    for same_study in (study, read_study(tmp_path)):
        times = collapse_times(same_study).droplevel("group")
        assert times["kl"].fillna(0).to_dict() == {0: 12, 1: 0, 2: 0}
        assert times["texts"].isna().all()
        (row,) = collapses(same_study)
        assert (row["collapsed"], row["mean of min(T, 30)"]) == ("1 of 3", "24.0 ± 25.8")
        assert same_study.ended_early["seed"].tolist() == [0, 1]


def test_the_collapse_of_an_agent_in_several_roles_is_judged_by_the_mean_over_roles():
    """Only the first role's KL rises, to 120, so the mean over both roles is 60.5."""

    def both_roles(seed, k, role):
        return 1.0, (120.0 if k >= 30 and role == "pioneer" else 1.0), 1.0

    study = make_study({"CORY": both_roles}, roles=("pioneer", "observer"), seeds=1)
    metrics = study.metrics.assign(agent="agent_1").drop(columns="combined_reward")
    one_agent = assemble(study.runs, metrics)
    assert collapse_times(one_agent)["kl"].tolist() == [39]  # when nine of ten iterations have 60.5


def test_answers_of_one_word_do_not_collapse():
    """Their distinct-2 is 0 from the start and cannot fall."""
    study = make_study({"PPO": lambda *_: (1.0, 1.0, 0.0)})
    assert collapse_times(study)["texts"].isna().all()


def test_distinct_2_is_compared_with_the_untrained_agent_at_the_same_length():
    """The untrained agents' distinct-2 is exp(-length / 10), measured in first batches with 4 to 12 tokens a response.

    PPO's responses grow to 14 tokens and have the distinct-2 expected at that length. CORY's shrink to 4 tokens but
    have the distinct-2 of 14 tokens, so they have collapsed.
    """
    study = make_study(dict.fromkeys(["PPO", "CORY"], lambda *_: (1.0, 1.0, 1.0)))
    first_length = 4.0 + 2 * study.metrics["seed"].astype(float)
    starts = study.metrics["iteration"] == 0
    is_ppo = study.metrics["group"] == "PPO"
    at_the_end = pd.Series(np.where(is_ppo, 14.0, 4.0))
    length = first_length.where(starts, at_the_end)
    study.metrics["response_tokens"] = length
    study.metrics["distinct_2"] = np.exp(-length.where(starts, 14.0) / 10)
    texts = collapse_times(study)["texts"]
    assert texts["PPO"].isna().all()
    assert texts["CORY"].notna().all()

    # With a fixed length limit, the reference is the mean of the first iterations, about exp(-0.8).
    study.runs[SHORTEST] = study.runs[LIMIT]
    assert collapse_times(study)["texts"].isna().all()
    study.metrics.loc[~starts, "distinct_2"] = 0.49 * np.exp(-0.8)
    assert collapse_times(study)["texts"].notna().all()


def test_without_a_collapse_no_difference_is_given_and_planned_lengths_must_agree():
    study = make_study({"PPO": lambda *_: (1.0, 1.0, 1.0), "CORY": lambda *_: (1.0, 1.0, 1.0)})
    assert [row["difference"] for row in collapses(study)] == ["", ""]
    study.runs.loc[study.runs["group"] == "CORY", "planned"] = 50
    with pytest.raises(ValueError, match=r"\[40, 50\]"):
        collapses(study)


def test_a_run_ended_by_its_kl_before_ten_iterations_counts_with_the_mean_of_these(tmp_path):
    for seed, guard in enumerate(["guards.stop_at_kl", "guards.patience"]):
        folder = make_run(tmp_path / f"run-seed{seed}", seed=seed, iterations=4, kl=60.0)
        stopped(folder, guard)
    make_run(tmp_path / "run-seed2", seed=2, iterations=11)
    means = running_means(compared(tmp_path), "pioneer")
    assert means["seed"].tolist() == [2, 2, 0]
    assert means["task_reward"].tolist() == pytest.approx([0.45, 0.55, 0.15])
    assert means["kl"].tolist() == [1.0, 1.0, 60.0]
