"""Settings that differ between the agents of a run."""

from dataclasses import replace

from cory.build import make_agents


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
