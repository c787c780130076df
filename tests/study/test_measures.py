"""Measures of runs on series with known noise."""

import random

import pytest

from study.measures import unsteadiness
from study.records import Record


def test_two_agents_as_noisy_as_one_are_as_unsteady():
    """Not steadier, as the mean of their rewards would be."""
    noise = random.Random(0)
    agents = {name: [noise.choice([-1.0, 1.0]) for _ in range(4000)] for name in ("agent_1", "agent_2")}
    rows = [
        {"iteration": k, "agent": name, "role": ("pioneer", "observer")[(place + k // 5) % 2], "task_reward": values[k]}
        for k in range(4000)
        for place, (name, values) in enumerate(agents.items())
    ]
    one = unsteadiness(Record(None, {}, [row for row in rows if row["role"] == "pioneer"]))
    assert one == pytest.approx(0.9**0.5, abs=0.02)  # of unit noise less a mean over 10 in which it is
    assert unsteadiness(Record(None, {}, rows)) == pytest.approx(one, abs=0.02)
