"""The learning curves of a run."""

import matplotlib.pyplot as plt
import pytest
from conftest import PLOT_CURVES as plot_curves

PPO = "#c1440e"


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_only_a_single_curve_of_a_run_has_the_colour_of_ppo(agents, monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    record = {"iteration": 0, "task_reward": 1.0, "kl": 1.0, "combined_reward": 1.0}
    history = [
        record | {"agent": f"agent_{number}", "role": f"role_{number}"}
        for number in range(1, agents + 1)
    ]
    plot_curves(history, tmp_path / "curves.png", "role_1")
    used = [line.get_color() for line in figures[0].axes[0].get_lines()]
    assert len(set(used)) == agents
    assert (PPO in used) == (agents == 1)


def test_agents_with_the_same_team_reward_are_both_seen(monkeypatch, tmp_path):
    """agent_2's curve is dashed, so that agent_1's shows through it."""
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    record = {"task_reward": 1.0, "team_reward": 2.0, "kl": 1.0, "combined_reward": 1.0}
    history = [
        {"iteration": k, "agent": f"agent_{number}", "role": f"role_{number}"} | record
        for k in range(4)
        for number in (1, 2)
    ]
    plot_curves(history, tmp_path / "curves.png", "role_1")
    axis = figures[0].axes[0]
    lower, upper = (line for line in axis.get_lines() if line.get_linewidth() > 1)
    assert lower.get_linestyle() == "-" and upper.get_linestyle() == "--"
    assert "up to 10" in axis.get_xlabel()
