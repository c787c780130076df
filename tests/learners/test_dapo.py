"""DAPO against a plain loop: the loss is a mean over the batch's tokens, without responses that were cut off."""

import copy

import pytest
import torch
from conftest import sentences
from group_learner import logprobs, make, update
from ragged import ragged, rollout_of, weights

from cory.build import make_agents
from cory.config import SamplingConfig
from cory.learners.algorithms import group_advantages
from cory.parallel import distributed

FINISHED = [True, False, True, True, True, True, False, True]


def plain_step(learner):
    """Returns the loss of the first step and the weights after it."""
    queries, responses, scores = ragged()
    model = copy.deepcopy(learner.policy)
    advantages = group_advantages(scores, "grpo", 4)
    total, count = 0.0, 0
    for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
        if not FINISHED[row]:
            continue
        new = logprobs(model, query, response)
        ref = logprobs(learner.reference.pretrained_model, query, response)
        for t in range(len(response)):
            ratio = torch.exp(new[t] - new[t].detach())
            gap = ref[t].detach() - new[t]
            kl = learner.kl_controller.value * ratio * (gap.exp() - gap - 1)
            total = total - ratio * advantages[row] + kl
            count += 1
    loss = total / count
    loss.backward()
    rate = learner.ppo.learning_rate
    return loss.item(), torch.cat(
        [(p - rate * p.grad).detach().flatten() for p in model.parameters()]
    )


@pytest.mark.parametrize(
    "split",
    [{}, {"mini_batch_size": 4, "gradient_accumulation_steps": 2, "micro_batch": 1}],
    ids=["whole", "in parts"],
)
def test_loss_and_gradient_equal_a_plain_loop(tokenizer, split):
    """Every token has the same weight, however the batch is split."""
    learner = make(tokenizer, "dapo", ppo_epochs=1, learning_rate=0.05, **split)
    before = weights(learner)
    loss, expected = plain_step(learner)
    stats = update(learner, *ragged(), FINISHED)
    assert stats.policy_loss == pytest.approx(loss, rel=1e-5)
    moved = (expected - before).abs().max()
    assert moved > 1e-3 and (weights(learner) - expected).abs().max() < 2e-6 * moved


def test_the_mean_is_over_the_tokens_of_all_processes(tokenizer, monkeypatch):
    learner = make(tokenizer, "dapo")
    _, responses, _ = ragged()
    halves = [
        rollout_of([None] * 4, responses[rows], FINISHED[rows])
        for rows in (slice(0, 4), slice(4, 8))
    ]
    counted = [len(r) for r, ended in zip(responses, FINISHED, strict=True) if ended]
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_reduce_sum", lambda tensor: 0 * tensor + sum(counted))
    for half in halves:
        weights = learner.row_weights([half])
        # The learner divides by the 4 responses of its process, and gradients are averaged over the 2 processes.
        expected = [ended / sum(counted) for ended in half.finished]
        assert (weights / 4 / 2).tolist() == pytest.approx(expected)


def test_a_batch_of_cut_responses_changes_no_weight(tokenizer):
    learner = make(tokenizer, "dapo")
    before = weights(learner)
    stats = update(learner, *ragged(), [False] * 8)
    assert stats.policy_loss == 0.0 and torch.equal(weights(learner), before)


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce"])
def test_the_share_of_groups_with_equal_rewards(tokenizer, algorithm):
    learner = make(tokenizer, algorithm)
    queries, responses, _ = ragged()
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    stats = update(learner, queries, responses, rewards)
    assert stats.metrics()["frac_reward_zero_std"] == 0.5


def test_rollouts_mark_the_responses_that_ended(config):
    """Responses end at an end token or a stop string. At the length limit, they are cut off."""
    agent = make_agents(config)[0]
    sampling = SamplingConfig(1, 12, stop=["good"])
    rollout = agent.respond(sentences(16), sampling, torch.Generator().manual_seed(0))
    end = agent.tokenizer.eos_token_id
    ended = [
        ids[-1].item() == end or "good" in agent.tokenizer.decode(ids)
        for ids in rollout.response_ids
    ]
    assert rollout.finished == ended and 0 < sum(ended) < 16
