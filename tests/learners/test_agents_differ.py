"""Agents with settings of their own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cory.agent import make_agents
from cory.errors import UserError


def test_an_agent_has_its_own_kl_coefficient(config):
    config = replace(config, agents=[{"init_kl_coef": 0.7}, {}])
    first, second = make_agents(config)
    assert first.learner.kl_controller.value == 0.7
    assert second.learner.kl_controller.value == config.ppo.init_kl_coef != 0.7
    for agent in (first, second):
        agent.learner.kl_controller.value = 9.0
        agent.restart()
    assert first.learner.kl_controller.value == 0.7
    assert second.learner.kl_controller.value == config.ppo.init_kl_coef


def test_it_is_read_in_the_update(config):
    """Without rewards the KL alone moves an agent, and not where its coefficient is 0."""
    agents = make_agents(replace(config, agents=[{"init_kl_coef": 0.0}, {}], algorithm="grpo"))
    size = config.ppo.batch_size
    moved = []
    for agent in agents:
        with torch.no_grad():
            for parameter in agent.learner.model_params:
                parameter.add_(0.01 * torch.randn_like(parameter))
        before = [p.detach().clone() for p in agent.learner.model_params]
        rollout = agent.respond(["the film"] * size, 4, torch.Generator().manual_seed(0))
        agent.learn([rollout], [torch.zeros(size)], np.random.default_rng(0))
        moved.append(
            any(
                not torch.equal(a, b)
                for a, b in zip(before, agent.learner.model_params, strict=True)
            )
        )
    assert moved == [False, True]


@pytest.mark.parametrize("entry", [{"init_kl_coef": 0.1}, {"learning_rate": 0.1}])
def test_a_frozen_agent_has_none(config, entry):
    (key,) = entry
    with pytest.raises(UserError, match=rf"agents\.0\.{key}"):
        replace(config, agents=[{"trained": False, **entry}, {}]).check()


def test_it_is_not_negative(config):
    with pytest.raises(UserError, match=r"agents\.0\.init_kl_coef"):
        replace(config, agents=[{"init_kl_coef": -0.1}, {}])
