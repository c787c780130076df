"""Credit modes: exact expected gradients by enumeration, and the rewards that a run gives each role."""

from dataclasses import replace

import pytest
import torch
from conftest import count_good, make_trainer, optimizer_steps, run_iteration
from learning import spy
from torch import Tensor

from cory.config import CoryConfig
from cory.credit import assign_credit
from cory.learners.algorithms import group_advantages
from cory.run.measure import flags
from study.chain_gradients import (
    NOTHING,
    Chain,
    Estimate,
    Outcomes,
    concatenated,
    crossed,
    grouped,
    groups,
    moments,
    response,
    subtrees,
    task_rewards,
)
from study.credit import credited, unread


def make_world(dependence: float, seed: int = 0, answers: int = 4, queries: int = 1) -> Chain:
    """Returns a random chain of two roles. `dependence` scales the first response's effect on the second role."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[tuple[Tensor, ...]] = []
    for _ in range(queries):
        pioneer = torch.randn(answers, generator=generator)
        observer = torch.randn(answers, generator=generator)
        reading = dependence * torch.randn(answers + 1, answers, generator=generator)
        rewards = torch.randn(2, answers, generator=generator)
        parts.append((pioneer[None], observer + reading, *rewards))
    pioneer, observer, r1, r2 = (torch.stack(part).double() for part in zip(*parts, strict=True))
    return Chain((pioneer, observer), (r1, r2))


def mode_gradient(mode: str, chain: Chain) -> tuple[Tensor, float]:
    """Returns mean and variance of a single chain's policy gradient in a credit mode, without a baseline."""
    outcomes = groups(chain, (1, 1), unread(chain))
    estimate = moments(chain, outcomes, lambda part: credited(chain, part, mode))
    return torch.cat(estimate.means), sum(estimate.variances)


@pytest.mark.parametrize("dependence", [0.0, 2.0])
def test_the_expected_gradient_of_most_modes_is_that_of_the_summed_reward(dependence):
    """Mean credit halves this gradient. Own credit has it only if the second response does not depend on the first."""
    chain = make_world(dependence)
    wanted = torch.cat(chain.objective_gradient())
    means = {
        mode: mode_gradient(mode, chain)[0]
        for mode in ("collective", "mean", "causal", "counterfactual", "own")
    }
    for mode in ("collective", "causal", "counterfactual"):
        assert torch.allclose(means[mode], wanted, atol=1e-12), mode
    assert torch.allclose(means["mean"], wanted / 2, atol=1e-12)
    assert torch.allclose(means["own"], wanted, atol=1e-12) == (dependence == 0)
    causal, collective = (
        sum(mode_gradient(mode, make_world(dependence, seed))[1] for seed in range(10))
        for mode in ("causal", "collective")
    )
    assert causal < 0.95 * collective


def batch_gradient(algorithm: str, branches: int, chain: Chain, mode: str) -> Estimate:
    """Returns the policy gradient of a batch of two pioneer responses with `branches` observer responses each.

    With RLOO, both pioneers answer the only query; with REINFORCE, each draws one of two queries. REINFORCE subtracts a
    batch mean that includes the response itself, which multiplies the gradient by (pioneers - 1) / pioneers. This is
    undone here. With several branches, observers subtract the mean over the other branches, which leaves the response
    out and needs no correction.
    """
    pioneers = 2
    trees = [subtrees(chain, (pioneers, branches), query) for query in range(chain.num_queries)]
    drawn = concatenated([tree.scaled(1 / chain.num_queries) for tree in trees])
    unbiased = pioneers / (pioneers - 1) if algorithm == "reinforce" else 1.0

    def advantages(r1: Tensor, r2: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each role's advantages in one outcome, from its task rewards."""
        credit = assign_credit([r1, r2], mode)
        pioneer_advantages = group_advantages(credit[0], algorithm, pioneers) * unbiased
        observer_advantages = group_advantages(credit[1], algorithm, pioneers, branches)
        return pioneer_advantages, observer_advantages * (unbiased if branches == 1 else 1.0)

    return moments(
        chain,
        [grouped(drawn, pioneers)],
        lambda part: torch.vmap(advantages)(*task_rewards(chain, part)),
    )


@pytest.mark.parametrize(("algorithm", "mode"), [("reinforce", "collective"), ("rloo", "causal")])
def test_branches_do_not_change_the_expected_gradient(algorithm, mode):
    chain = make_world(2.0, 3, 3, 2 if algorithm == "reinforce" else 1)
    wanted = torch.cat(chain.objective_gradient())
    batches = {branches: batch_gradient(algorithm, branches, chain, mode) for branches in (1, 2)}
    for batch in batches.values():
        assert torch.allclose(torch.cat(batch.means), wanted, atol=1e-12, rtol=0)
    # With the same number of pioneers, more observers reduce both roles' variance.
    assert all(
        two < one for two, one in zip(batches[2].variances, batches[1].variances, strict=True)
    )


def test_branches_with_different_rows_have_the_gradient_of_the_mean_over_rows():
    """The variance of the pioneer's gradient is lower than if all observers get the same randomly drawn row."""
    questions = 3
    chain = make_world(2.0, 0, 3, questions)
    # The pioneer answers once for all questions and does not see them.
    chain = Chain(
        (chain.policies[0][:1], chain.policies[1]),
        (chain.rewards[0][:1].expand(questions, -1), chain.rewards[1]),
    )

    def advantages(outcomes: Outcomes) -> tuple[Tensor, Tensor]:
        return torch.vmap(outcome_advantages)(*task_rewards(chain, outcomes))

    def outcome_advantages(r1: Tensor, r2: Tensor) -> tuple[Tensor, Tensor]:
        pioneer_credit, observer_credit = assign_credit([r1, r2], "causal")
        if len(r2) > 1:
            observer_credit = group_advantages(observer_credit, "rloo", 1, len(r2))
        return pioneer_credit, observer_credit

    pioneer = response(chain, 0, 0, NOTHING)
    asked_all = []
    for answer in range(3):
        columns = {name: column[[answer]] for name, column in pioneer.columns.items()}
        outcomes = Outcomes(pioneer.chances[[answer]], columns)
        for question in range(questions):
            outcomes = crossed(outcomes, response(chain, 1, question, answer))
        asked_all.append(outcomes)
    all_questions = moments(chain, asked_all, advantages)
    one_question = moments(chain, groups(chain, (1, 1)), advantages)
    repeated_question = moments(chain, groups(chain, (1, questions)), advantages)
    wanted = torch.cat(chain.objective_gradient())
    for estimate in (all_questions, one_question, repeated_question):
        assert torch.allclose(torch.cat(estimate.means), wanted, atol=1e-12, rtol=0)
    assert all_questions.variances[0] < repeated_question.variances[0] < one_question.variances[0]


def test_a_team_reward_is_added_to_any_modes_credit():
    r1 = torch.tensor([1.0, 2.0])
    r2 = torch.tensor([10.0, 20.0, 30.0, 50.0])
    team = torch.tensor([0.0, 100.0, 200.0, 400.0])
    unread = [torch.tensor([1.0, 1.0, 2.0, 2.0])]
    information = [torch.tensor([0.5, 1.5, -3.0, 1.0])]
    first = {
        "collective": [16.0, 42.0],
        "mean": [8.0, 21.0],
        "causal": [16.0, 42.0],
        "own": [1.0, 2.0],
        "counterfactual": [15.0, 40.0],
        "information": [2.0, 1.0],
    }
    second = {"collective": [11.0, 21.0, 32.0, 52.0], "mean": [5.5, 10.5, 16.0, 26.0]}
    for mode, pioneer_credit in first.items():
        rewards = assign_credit([r1, r2], mode, 1.0, unread, team, information)
        # A pioneer gets the mean team reward over its observers.
        assert rewards[0].tolist() == [pioneer_credit[0] + 50, pioneer_credit[1] + 300]
        assert rewards[1].tolist() == [
            a + b for a, b in zip(second.get(mode, r2.tolist()), team.tolist(), strict=True)
        ]
        without_team = assign_credit([r1, r2], mode, 1.0, unread, information=information)
        assert without_team[0].tolist() == pioneer_credit


def test_counterfactual_credit_subtracts_the_observers_reward_without_the_first_response(config):
    cory = CoryConfig(credit="counterfactual", weight=0.5, exchange_period=0)
    trainer = make_trainer(replace(config, cory=cory))
    answered = []
    respond = trainer.agents[1].respond

    def answers(prompts, *args):
        answered.append(respond(prompts, *args))
        return answered[-1]

    trainer.agents[1].respond = answers
    seen = spy(trainer)
    trainer.iteration(0)
    batch = trainer.task.batch(0, 8, config.seed)["prompt"]
    r1, r2 = (
        torch.tensor(count_good(batch, seen[0][f"agent_{i}"][0][0].completions)) for i in (1, 2)
    )
    unread = answered[-1]
    b2 = torch.tensor(count_good(batch, unread.completions))
    assert torch.allclose(seen[0]["agent_1"][1][0], r1 + 0.5 * (r2 - b2))
    assert torch.allclose(seen[0]["agent_2"][1][0], r2)
    assert unread.prompts == [f'Improve "{query}": {query}' for query in batch]


def test_an_agent_in_both_roles_learns_from_both_at_once(config):
    shared = CoryConfig(num_agents=1, chain_length=2, credit="causal")
    trainer = make_trainer(replace(config, cory=shared))
    (agent,) = trainer.agents
    seen = spy(trainer)
    records = run_iteration(trainer, 0)
    (rollouts, rewards), batch = seen[0]["agent_1"], trainer.task.batch(0, 8, config.seed)["prompt"]
    assert rollouts[0].prompts == batch
    pairs = zip(batch, rollouts[0].completions, strict=True)
    assert rollouts[1].prompts == [
        f'Improve "{query}{response}": {query}' for query, response in pairs
    ]
    r1, r2 = (torch.tensor(count_good(batch, rollout.completions)) for rollout in rollouts)
    assert torch.allclose(torch.stack(rewards), torch.stack([r1 + r2, r2]))
    assert [record["role"] for record in records] == ["pioneer", "observer"]
    assert [record["task_reward"] for record in records] == pytest.approx(
        [r1.mean().item(), r2.mean().item()]
    )
    # Two roles double the rows, and mini-batches keep their size, so there are twice as many steps.
    assert optimizer_steps(agent) == 2 * config.ppo.ppo_epochs
    lengths = [sum(map(len, rollout.response_ids)) / 8 for rollout in rollouts]
    assert [record["response_tokens"] for record in records] == pytest.approx(lengths)
    trainer.iteration(1)
    kls = [record["kl"] for record in run_iteration(trainer, 2)]
    assert kls[0] > 0 and kls[1] > 0 and kls[0] != kls[1]  # the KL is recorded by role


def test_chains_of_a_group_share_their_query_and_the_reward_gets_the_role(config):
    columns = {}

    def reward(prompts, completions, role, label):
        columns.update(prompts=prompts, role=role, label=label)
        return [float(len(text)) for text in completions]

    trainer = make_trainer(replace(config, algorithm="rloo", group_size=4), reward)
    seen = spy(trainer)
    trainer.iteration(0)
    assert columns["role"] == ["pioneer"] * 8 + ["observer"] * 8
    first, second = columns["label"][0], columns["label"][4]
    assert columns["label"] == ([first] * 4 + [second] * 4) * 2 and first != second
    assert columns["prompts"][:4] == [trainer.task.dataset["prompt"][first]] * 4
    prompts, completions = (
        getattr(seen[0]["agent_2"][0][0], key) for key in ("prompts", "completions")
    )
    assert len(set(completions)) > 2 and len(prompts) == 8


@pytest.mark.parametrize(("credit", "flagged"), [("own", True), ("causal", False)])
def test_the_flag_equal_rewards_looks_at_the_rewards_that_a_role_is_trained_on(
    config, credit, flagged
):
    def second_role_only(prompts, completions, role):
        earned = count_good(prompts, completions)
        return [
            reward if who == "observer" else 0.0 for reward, who in zip(earned, role, strict=True)
        ]

    config = replace(config, cory=CoryConfig(credit=credit))
    pioneer, observer = run_iteration(make_trainer(config, second_role_only), 0)
    assert pioneer["role"] == "pioneer" and pioneer["task_reward"] == 0
    assert ("equal_rewards" in pioneer["flags"]) == flagged
    assert "equal_rewards" not in observer["flags"]


def test_answers_of_one_word_are_not_flagged_as_collapsed():
    record = {"kl": 1.0, "dropped_steps": 0, "distinct_2": 0.0}
    rewards = torch.tensor([0.0, 1.0])
    assert flags(record, record, rewards, ["yes", "no"], kl_bound=10.0) == []
    assert flags(record, record, rewards, ["yes", "no"], kl_bound=0.5) == ["kl", "collapse"]
    later = record | {"distinct_2": 0.3}
    assert flags(later, record | {"distinct_2": 0.8}, rewards, ["a b", "a c"], 10.0) == ["collapse"]
