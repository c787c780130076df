"""REINFORCE, RLOO and GRPO against plain loops over single responses."""

import math

import pytest
import torch
from accelerate import Accelerator
from conftest import make_gpt2
from group_learner import GROUP, LONGEST, logprobs, make, update
from ragged import ragged, weights

import cory.learners.learner
from cory.config import Config
from cory.learners.algorithms import GROUP_ALGORITHMS, ResponseTokens
from cory.models.prefixes import share_prompts


def plain_advantages(rewards, algorithm):
    """Computes advantages by loops over groups, as in the papers."""
    result = []
    mean_of_all = sum(rewards) / len(rewards)
    for start in range(0, len(rewards), GROUP):
        group = rewards[start : start + GROUP]
        mean = sum(group) / GROUP
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (GROUP - 1))
        for i, r in enumerate(group):
            others = [other for j, other in enumerate(group) if j != i]
            baselines = {"rloo": sum(others) / (GROUP - 1), "reinforce": mean_of_all}
            advantage = r - baselines.get(algorithm, mean)
            result.append(advantage / (std + 1e-4) if algorithm in ("grpo", "gspo") else advantage)
    return result


def plain_loss(model, ref, olds, queries, responses, advantages, algorithm, kl_coef):
    """Returns the mean loss over responses."""
    total = 0.0
    for query, response, old, advantage in zip(queries, responses, olds, advantages, strict=True):
        new = logprobs(model, query, response)
        with torch.no_grad():
            reference = logprobs(ref, query, response)
        if algorithm == "gspo":
            mean_ratio = torch.exp((new.sum() - old.sum()) / len(response))
        k3 = [
            (torch.exp(reference[t] - new[t]) - (reference[t] - new[t]) - 1) * kl_coef
            for t in range(len(response))
        ]
        if algorithm in ("rloo", "reinforce"):
            ratio = torch.exp(new.sum() - old.sum())
            total = total - torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            continue
        tokens = 0.0
        for t in range(len(response)):
            token_ratio = torch.exp(new[t] - old[t])
            ratio = mean_ratio if algorithm == "gspo" else token_ratio
            tokens = (
                tokens
                - torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                + token_ratio * k3[t]
            )
        total = total + tokens / (LONGEST if algorithm == "dr_grpo" else len(response))
    return total / len(queries)


@pytest.mark.parametrize(
    ("algorithm", "shared"),
    [
        ("grpo", False),
        ("dr_grpo", True),
        ("gspo", True),
        ("rloo", False),
        ("reinforce", True),
    ],
)
def test_loss_and_gradient_equal_a_plain_loop(tokenizer, algorithm, shared, monkeypatch):
    """The KL penalty is in the loss of GRPO, Dr. GRPO and GSPO, and in the reward of RLOO and REINFORCE."""
    in_loss = algorithm in ("grpo", "dr_grpo", "gspo")
    laid_out = []
    monkeypatch.setattr(
        cory.learners.learner,
        "share_prompts",
        lambda *args: laid_out.append(share_prompts(*args)) or laid_out[-1],
    )
    # The rate lets the second step clip without diverging. RLOO and REINFORCE sum over tokens, so theirs is lower.
    rate = 0.05 if in_loss else 0.005
    learner = make(tokenizer, algorithm, learning_rate=rate)
    model, ref = make_gpt2(tokenizer).double(), make_gpt2(tokenizer, seed=1).double()
    queries, responses, scores = ragged()
    if shared:
        queries = [queries[row // GROUP * GROUP] for row in range(len(queries))]
    with torch.no_grad():
        olds = [logprobs(model, *row) for row in zip(queries, responses, strict=True)]
        refs = [logprobs(ref, *row) for row in zip(queries, responses, strict=True)]
    eta = learner.kl_controller.value
    penalties = [
        0.0 if in_loss else eta * (old - r).sum().item() for old, r in zip(olds, refs, strict=True)
    ]
    advantages = plain_advantages(
        [s - p for s, p in zip(scores.tolist(), penalties, strict=True)], algorithm
    )
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    values = []
    for _ in range(2):  # the second step is off-policy, where ratios differ from 1 and are clipped
        loss = plain_loss(
            model, ref, olds, queries, responses, advantages, algorithm, eta * in_loss
        )
        values.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= rate * gradient
    stats = update(learner, queries, responses, scores)
    assert stats.policy_loss == pytest.approx(sum(values) / 2, rel=1e-6, abs=1e-6)
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    # The learner computes log-probabilities in float32, this test in float64.
    moved = (expected - before).abs().max()
    assert moved / rate > 1e-2 and (weights(learner) - expected).abs().max() < 2e-6 * moved
    assert all((layout is not None) == shared for layout in laid_out)
    assert shared or stats.clip_fraction > 0


@pytest.mark.parametrize(
    ("algorithm", "split"),
    [
        ("grpo", {"micro_batch": 3}),
        ("rloo", {"mini_batch_size": 4, "gradient_accumulation_steps": 2}),
    ],
)
def test_micro_batches_change_no_number(tokenizer, algorithm, split):
    results = []
    learners = [make(tokenizer, algorithm, ppo_epochs=1, **settings) for settings in (split, {})]
    # Accelerate keeps one global number of accumulation steps, which a reward function might set.
    Accelerator(gradient_accumulation_steps=3)
    for learner in reversed(learners):
        update(learner, *ragged())
        results.append(weights(learner))
    before = weights(make(tokenizer, algorithm))
    distance = (results[0] - results[1]).norm() / (results[0] - before).norm()
    # Means over responses do not depend on the split. Means over a mini-batch's tokens would.
    assert distance < 1e-6


@pytest.mark.parametrize("algorithm, by_response", [("rloo", True), ("grpo", False)])
def test_the_ratio_threshold_watches_the_ratio_in_the_loss(algorithm, by_response):
    """RLOO's ratio is a product over the response: 50 tokens of exp(0.1) give 148, above `ratio_threshold`."""
    mask = torch.ones(2, 50)
    old = torch.full((2, 50), -2.0)
    tokens = ResponseTokens(
        logprobs=old + 0.1, old_logprobs=old, ref_logprobs=old, advantages=-mask, mask=mask
    )
    terms = GROUP_ALGORITHMS[algorithm](Config()).losses(tokens, kl_coef=0.0)
    mean = (terms.ratio * mask).mean().item()
    assert mean == pytest.approx(math.exp(5.0 if by_response else 0.1), rel=1e-4)
