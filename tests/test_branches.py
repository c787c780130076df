"""Branches: several observer responses to each pioneer response."""

from dataclasses import replace

import pytest
import torch
from conftest import make_trainer
from learning import spy, state

from cory.config import CoryConfig, SamplingConfig
from cory.run.folder import read_rows

SHARED = CoryConfig(num_agents=1, chain_length=2)


@pytest.mark.parametrize(
    "changes",
    [{"algorithm": "ppo"}, {"algorithm": "rloo", "group_size": 2}, {"cory": SHARED}],
    ids=["ppo", "rloo", "shared"],
)
def test_observers_answer_after_the_same_response(config, changes):
    trainer = make_trainer(replace(config, branches=2, **changes))
    seen = spy(trainer)
    before = [state(agent) for agent in trainer.agents]
    iteration = trainer.iteration(0)
    first, second = iteration.rollouts
    assert (len(first.prompts), len(second.prompts)) == (4, 8)
    group = trainer.config.chains_per_query
    queries = trainer.task.batch(0, 4 // group, trainer.config.seed)["prompt"]
    assert first.prompts == [query for query in queries for _ in range(group)]
    for row, prompt in enumerate(second.prompts):
        query, response = first.prompts[row // 2], first.completions[row // 2]
        assert prompt == f'Improve "{query}{response}": {query}'
    assert len(set(second.completions)) == 8  # observers sample independently

    r1, r2 = iteration.task_rewards
    learned = [rewards for given in seen[0].values() for rewards in given[1]]
    assert torch.allclose(learned[0], r1 + r2.view(4, 2).mean(1))
    assert torch.allclose(learned[1], r2 + r1.repeat_interleave(2))
    for agent, old in zip(trainer.agents, before, strict=True):
        assert not torch.equal(state(agent), old)

    # A role's statistics cover only its own responses.
    for record, rollout in zip(iteration.records, iteration.rollouts, strict=True):
        mean = sum(map(len, rollout.response_ids)) / len(rollout.response_ids)
        assert record["response_tokens"] == pytest.approx(mean)
    tokens = sum(len(row) for rollout in iteration.rollouts for row in rollout.response_ids)
    counted = iteration.timings["tokens_per_second"] * iteration.timings["seconds_total"]
    assert counted == pytest.approx(tokens, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, [[6], [4, 4, 4]]), ({"cory": SHARED}, [[4, 5, 4, 5]])],
    ids=["two agents", "shared"],
)
def test_no_mini_batch_is_empty(config, changes, expected):
    """A step has 4 mini-batches of one row. The pioneer's 6 rows, too few for two steps, make a single step."""
    ppo = replace(
        config.ppo, batch_size=12, mini_batch_size=1, gradient_accumulation_steps=4, ppo_epochs=1
    )
    trainer = make_trainer(replace(config, branches=2, ppo=ppo, **changes))
    rows_of_steps = []
    for agent in trainer.agents:
        rows_of_steps.append(rows := [])
        gradients = agent.learner._gradients
        agent.learner._gradients = lambda experience, indices, rows=rows, gradients=gradients: (
            rows.append(len(indices)) or gradients(experience, indices)
        )
    trainer.iteration(0)
    assert rows_of_steps == expected


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_both_roles_of_one_agent_have_the_same_weight(config, algorithm):
    """With plain gradient steps, an agent in both roles moves by the mean of the two single-role updates.

    The policy differs from its reference, so that the KL and PPO's value loss also count.
    """
    ppo = replace(config.ppo, ppo_epochs=1, init_kl_coef=5.0, vf_coef=1.0)
    # PPO's losses are means over tokens, so roles have the same weight only if their responses are equally long.
    config = replace(config, branches=4, ppo=ppo, sampling=SamplingConfig(6, 6))
    config = replace(config, algorithm=algorithm, group_size=2 if algorithm == "grpo" else "auto")
    moved = []
    for roles in ([0, 1], [0], [1]):
        trainer = make_trainer(replace(config, cory=SHARED))
        (agent,) = trainer.agents
        agent.learner.mini_batch_size = 16  # all rows make one step
        agent.learner.optimizer = torch.optim.SGD(agent.learner.model_params, lr=1e-3)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in agent.learner.model_params:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        before, learn = state(agent), agent.learn

        def learn_roles(rollouts, rewards, *args, roles=roles, learn=learn):
            chosen = ([rollouts[role] for role in roles], [rewards[role] for role in roles])
            stats = learn(*chosen, *args)
            return stats if len(roles) == 2 else stats * 2

        agent.learn = learn_roles
        trainer.iteration(0)
        moved.append((state(agent) - before).double())
    both, first, second = moved
    assert (both - (first + second) / 2).norm() < 1e-3 * both.norm()  # equal up to rounding
    assert (both - first).norm() > 0.1 * both.norm()


def test_samples_show_the_first_branch(config):
    trainer = make_trainer(replace(config, branches=2, sample_every=1, iterations=1))
    iterations, run = [], trainer.iteration
    trainer.iteration = lambda k: iterations.append(run(k)) or iterations[-1]
    folder = trainer.train().folder
    first, second = iterations[0].rollouts
    samples = read_rows(folder / "samples.jsonl")
    assert [row["completion"] for row in samples] == first.completions + second.completions[::2]
    rewards = iterations[0].task_rewards[1][::2].tolist()
    assert [row["task_reward"] for row in samples[4:]] == rewards
