"""Iterations until a reward is reached, and squared gradient norms, on hand-made runs."""

import pandas as pd
import pytest

from study.confirmation import confirmed
from study.frame import Study


def make_study(slow: int):
    """Rewards rise by 0.05 an iteration up to 0.66.

    The rival learns `slow` iterations later and has twice the gradient norm.
    """
    runs, metrics = [], []
    for seed in range(5):
        for group, delay, norm in (("ours", 0, 1.0), ("rival", slow, 2.0)):
            runs.append(
                {"group": group, "seed": seed, "baseline": group == "ours", "first_role": "pioneer"}
            )
            for k in range(40):
                reward = min(0.66, 0.05 * max(0, k - delay - seed))
                line = {"group": group, "seed": seed, "iteration": k}
                # Gradients count only in the first ten iterations.
                size = norm * (1 + seed / 10) if k < 10 else 100.0
                metrics.append(
                    {**line, "role": "pioneer", "task_reward": 0.0, "gradient_norm": size}
                )
                metrics.append(
                    {**line, "role": "observer", "task_reward": reward, "gradient_norm": 7.0}
                )
    return Study(pd.DataFrame(runs), pd.DataFrame(metrics), pd.DataFrame(), pd.DataFrame())


@pytest.mark.parametrize("slow", [0, 4])
def test_the_rival_is_later_and_its_gradients_are_larger(slow):
    later, larger = confirmed(make_study(slow), "ours", "rival")
    # The running mean over ten iterations reaches 0.6 in every run, since rewards end at 0.66.
    assert later["measure"] == "iterations to 0.6" and later["n"] == "5"
    assert float(later["rival"]) - float(later["ours"]) == pytest.approx(slow)
    assert later["difference or ratio"].startswith(f"{slow:+.1f}")
    squares = [(1 + seed / 10) ** 2 for seed in range(5)]
    assert float(larger["ours"]) == pytest.approx(sum(squares) / 5, abs=0.01)
    assert (
        larger["difference or ratio"].startswith("4.00")
        and "higher" in larger["difference or ratio"]
    )


def test_a_level_must_be_reached_by_nine_of_ten_runs():
    study = make_study(0)
    high = (study.metrics["group"] == "rival") & (study.metrics["seed"] == 4)
    study.metrics.loc[high & (study.metrics["role"] == "observer"), "task_reward"] = 0.25
    later, _ = confirmed(study, "ours", "rival")
    assert later["measure"] == "iterations to 0.6"  # nine of ten runs reach it
    low = (study.metrics["group"] == "rival") & (study.metrics["seed"] >= 3)
    study.metrics.loc[low & (study.metrics["role"] == "observer"), "task_reward"] = 0.25
    later, _ = confirmed(study, "ours", "rival")
    assert later["measure"] == "iterations to 0.2"
