"""Differences between groups and the baseline, with Holm's correction over the table."""

import pandas as pd
import pytest

from study.differences import differences
from study.frame import Study


class AgainstGRPO(Study):
    """A study whose baseline is always the group GRPO."""

    def base_of(self, name):
        return "GRPO"


@pytest.fixture
def study():
    seeds = range(5)
    noise = [0.0, 0.01, -0.01, 0.02, -0.02]
    runs, final, held_out = [], [], []
    for group, reward, share in (("GRPO", 0.5, 0.4), ("DAPO", 0.7, 0.4)):
        for seed in seeds:
            run = {"group": group, "seed": seed}
            runs.append({**run, "fixed_roles": False})
            # GRPO and DAPO differ only by noise in the share of sampling groups whose rewards are all equal.
            difference = noise[seed] if group == "DAPO" else 0.0
            values = {"kl": 1.0, "frac_reward_zero_std": share + difference}
            final.append({**run, "agent": "agent_1", **values})
            for calls, answers in ((1, "agent_1"), (2, "agent_2 after agent_1")):
                row = {"answers": answers, "agent": answers.split()[0], "calls": calls}
                held_out.append({**run, **row, "task_reward": calls * (reward + difference)})
    return AgainstGRPO(*map(pd.DataFrame, (runs, [], final, held_out)))


def test_each_metric_has_its_difference_and_a_verdict(study):
    first, second = differences(study, ["held out: task_reward", "frac_reward_zero_std"])
    assert (first["metric"], first["group"], first["n"]) == ("held out: task reward", "DAPO", "5")
    assert first["mean of GRPO"].startswith("0.500") and first["mean"].startswith("0.700")
    # 2.776 * 0.0158 / sqrt(5) = 0.0196
    assert first["difference"] == "+0.200 (+0.180 to +0.220) higher ✓"
    assert second["difference"] == "+0.000 (-0.020 to +0.020) undecided"


def test_a_seed_that_only_one_group_has_does_not_count(study):
    is_last = (study.final["group"] == "GRPO") & (study.final["seed"] == 4)
    study.final = study.final[~is_last]
    (row,) = differences(study, ["frac_reward_zero_std"])
    assert row["n"] == "4"
    assert (row["mean"][:5], row["mean of GRPO"][:5]) == ("0.405", "0.400")


def test_groups_can_be_named(study):
    metric = "held out: task_reward"
    assert differences(study, [metric], groups=["DAPO"]) == differences(study, [metric])
    assert differences(study, [metric], groups=["GRPO"]) == []  # the baseline


def test_held_out_rows_of_two_calls_can_be_chosen(study):
    (row,) = differences(study, ["held out: task_reward"], calls=2)
    assert row["difference"] == "+0.400 (+0.361 to +0.439) higher ✓"
