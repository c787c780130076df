"""Branches: several observers after each response of the pioneer."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import run_iteration
from test_credit import spy
from test_trainer import make_trainer, state

from cory import Callback
from cory.agent import make_agents
from cory.config import CoryConfig, SamplingConfig
from cory.trainer import CoryTrainer

SHARED = CoryConfig(num_agents=1, chain_length=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "ppo"},
        {"algorithm": "reinforce"},
        {"algorithm": "rloo", "group_size": 2},
        {"algorithm": "grpo", "group_size": 2},
        {"algorithm": "ppo", "cory": SHARED},
    ],
    ids=["ppo", "reinforce", "rloo", "grpo", "shared"],
)
def test_observers_answer_after_the_same_response(config, changes):
    trainer = make_trainer(replace(config, branches=2, **changes))
    seen = spy(trainer)
    before = [state(agent) for agent in trainer.agents]
    iteration = trainer.iteration(0)
    first, second = iteration.rollouts
    assert (len(first.prompts), len(second.prompts)) == (4, 8) and (
        first.branches,
        second.branches,
    ) == (1, 2)
    queries = trainer.task.batch(0, 4 // trainer.config.chains_per_query, trainer.config.seed)[
        "prompt"
    ]
    assert first.prompts == [
        query for query in queries for _ in range(trainer.config.chains_per_query)
    ]
    for row, prompt in enumerate(second.prompts):
        query, response = first.prompts[row // 2], first.completions[row // 2]
        assert prompt == f'Improve "{query}{response}": {query}'
    assert len(set(second.completions)) == 8  # each draws for itself
    r1, r2 = iteration.task_rewards
    learned = [rewards for given in seen[0].values() for rewards in given[1]]
    assert torch.allclose(learned[0], r1 + r2.view(4, 2).mean(1))
    assert torch.allclose(learned[1], r2 + r1.repeat_interleave(2))
    assert all(
        not torch.equal(state(agent), old)
        for agent, old in zip(trainer.agents, before, strict=True)
    )


def test_tokens_per_second_count_the_responses_of_each_role(config):
    seen = []

    class Watch(Callback):
        def on_iteration_end(self, trainer, iteration):
            ids = [row for rollout in iteration.rollouts for row in rollout.response_ids]
            seen.append((len(ids), sum(map(len, ids)), iteration.timings))

    config = replace(config, branches=4, iterations=1)
    task = make_trainer(config).task
    CoryTrainer(config, make_agents(config), task, callbacks=[Watch()]).train()
    ((responses, tokens, timings),) = seen
    assert responses == 2 + 8
    counted = timings["tokens_per_second"] * timings["seconds_total"]
    assert counted == pytest.approx(tokens, rel=1e-3)


def test_mini_batches_split_the_pioneers_rows_evenly(config):
    ppo = replace(config.ppo, mini_batch_size=4, ppo_epochs=3)
    trainer = make_trainer(replace(config, branches=4, ppo=ppo))
    trainer.iteration(0)
    # 2 rows, and 8 rows in two mini-batches.
    assert [agent.optimizer_steps for agent in trainer.agents] == [3, 6]
    sizes = []
    trainer = make_trainer(replace(config, branches=4, ppo=ppo, cory=SHARED))
    (shared,) = trainer.agents
    gradients = shared.learner._gradients
    shared.learner._gradients = lambda experience, rows: (
        sizes.append(len(rows)) or gradients(experience, rows)
    )
    trainer.iteration(0)
    assert sizes == [3, 3, 4] * 3  # 10 rows in as few steps of at most 4 as that takes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, [[6], [4, 4, 4]]), ({"cory": SHARED}, [[4, 5, 4, 5]])],
    ids=["two agents", "shared"],
)
def test_no_mini_batch_is_empty(config, changes, expected):
    """Mini-batches of one row, four to a step: the pioneer's 6 rows make one step, not two with 3 each."""
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
    before = [state(agent) for agent in trainer.agents]
    trainer.iteration(0)
    assert rows_of_steps == expected
    assert all(
        not torch.equal(state(agent), old)
        for agent, old in zip(trainer.agents, before, strict=True)
    )


@pytest.mark.parametrize(
    ("algorithm", "kl_in"),
    [("reinforce", "reward"), ("reinforce", "loss"), ("grpo", "loss"), ("ppo", "reward")],
)
def test_both_roles_of_one_agent_count_alike(config, algorithm, kl_in):
    """By plain gradient steps, an agent in both roles moves by the mean of what each role alone would move it.

    The KL and PPO's value loss have a part in it, as the policy differs from its reference.
    """
    ppo = replace(
        config.ppo,
        ppo_epochs=1,
        optimizer="SGD",
        learning_rate=1e-3,
        kl_in=kl_in,
        init_kl_coef=5.0,
        vf_coef=1.0,
    )
    # PPO's losses are means over tokens, so that roles count alike if their responses are equally long.
    config = replace(config, branches=4, ppo=ppo, sampling=SamplingConfig(6, 6))
    config = replace(config, algorithm=algorithm, group_size=2 if algorithm == "grpo" else "auto")
    moved = []
    for held in ([0, 1], [0], [1]):
        trainer = make_trainer(replace(config, cory=SHARED))
        (agent,) = trainer.agents
        agent.learner.mini_batch_size = 16  # so that all rows make one step
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in agent.learner.model_params:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        before = state(agent)
        learn = agent.learn

        def only(rollouts, rewards, *args, held=held, learn=learn):
            stats = learn(
                [rollouts[role] for role in held], [rewards[role] for role in held], *args
            )
            return stats if len(held) == 2 else stats * 2

        agent.learn = only
        trainer.iteration(0)
        moved.append((state(agent) - before).double())
    both, first, second = moved
    assert (both - (first + second) / 2).norm() < 1e-3 * both.norm()  # rounding
    assert (both - first).norm() > 0.1 * both.norm()


def test_samples_show_the_first_branch(config):
    trainer = make_trainer(replace(config, branches=2, sample_every=1, iterations=1))
    iterations = []
    run = trainer.iteration
    trainer.iteration = lambda k: iterations.append(run(k)) or iterations[-1]
    folder = trainer.train().folder
    first, second = iterations[0].rollouts
    samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
    assert [row["completion"] for row in samples] == first.completions + second.completions[::2]
    assert [row["task_reward"] for row in samples[4:]] == iterations[0].task_rewards[1][
        ::2
    ].tolist()


def test_statistics_are_over_each_roles_own_responses(config):
    trainer = make_trainer(replace(config, branches=4, cory=SHARED))
    rollouts = []
    run = trainer.iteration
    trainer.iteration = lambda k: rollouts.append(run(k)) or rollouts[-1]
    records = run_iteration(trainer, 0)
    for record, rollout, rows in zip(records, rollouts[0].rollouts, (2, 8), strict=True):
        assert record["response_tokens"] == pytest.approx(
            sum(map(len, rollout.response_ids)) / rows
        )
