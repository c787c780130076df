"""Log-probabilities, KL and gradients belong to the sampled distribution, so the temperature applies to them."""

import copy

import pytest
import torch
from conftest import answering, make_gpt2, sentences
from group_learner import all_logprobs
from ragged import ragged

from cory.build import make_agents
from cory.config import Config, SamplingConfig
from cory.evaluation.answer import respond
from cory.learners import losses
from cory.learners.group import GroupLearner
from cory.learners.ppo import PolicyWithValueHead, PPOLearner
from cory.models import window
from cory.models.sample import sample
from cory.models.text import pad_token
from cory.models.window import WindowPolicy
from cory.streams import Purpose, Stream

CPU = torch.device("cpu")
TEMPERATURE = 0.6


def make(tokenizer, algorithm):
    """Returns a learner whose reference differs from its policy."""
    sampling = SamplingConfig(max_new_tokens=12, temperature=TEMPERATURE)
    config = Config(device="cpu", algorithm=algorithm, sampling=sampling)
    wrap, learner = (
        (PolicyWithValueHead, PPOLearner) if algorithm == "ppo" else (WindowPolicy, GroupLearner)
    )
    policy = wrap(make_gpt2(tokenizer))
    reference = WindowPolicy(make_gpt2(tokenizer, seed=1)).requires_grad_(False)
    return learner(policy, reference, tokenizer, config, CPU)


def tempered(model, query, response):
    """Returns the log-probabilities (tokens, vocabulary) along a response at the temperature."""
    return all_logprobs(model, query, response, TEMPERATURE)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_numbers_belong_to_the_tempered_distributions(tokenizer, algorithm):
    learner = make(tokenizer, algorithm)
    queries, responses, _ = ragged()
    batch = window.pack(queries, responses, pad_token(tokenizer))
    comparison = learner.compare_with_reference(batch)
    passed = learner.forward(batch)
    entropy = losses.entropy(passed.all_logprobs, 8)
    rows = zip(queries, responses, strict=True)
    for row, (query, response) in enumerate(rows):
        policy = tempered(learner.policy, query, response)
        reference = tempered(learner.reference.pretrained_model, query, response)
        length = len(response)
        for name, logprobs in (("logprobs", policy), ("ref_logprobs", reference)):
            expected = logprobs.gather(1, response[:, None])[:, 0]
            torch.testing.assert_close(getattr(comparison, name)[row, :length], expected.detach())
        kl = (policy.exp() * (policy - reference)).sum(1)
        torch.testing.assert_close(comparison.kl[row, :length], kl.detach(), rtol=1e-4, atol=1e-5)
        expected = -(policy.exp() * policy).sum(1)
        torch.testing.assert_close(entropy[row, :length], expected.detach(), rtol=1e-4, atol=1e-5)

    # The gradient of the tokens' log-probabilities.
    (passed.logprobs * batch.response_mask).sum().backward()
    model = copy.deepcopy(learner.policy)
    model.zero_grad()
    for query, response in zip(queries, responses, strict=True):
        tempered(model, query, response).gather(1, response[:, None]).sum().backward()
    for parameter, expected in zip(learner.policy.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-3, atol=1e-3)


def test_an_evaluation_measures_the_tempered_kl(tokenizer):
    model, base = make_gpt2(tokenizer), make_gpt2(tokenizer, seed=1)
    settings = SamplingConfig(5, 5, temperature=TEMPERATURE)
    (prompt,) = sentences(1)
    rollout, (divergence,) = respond(answering(model, tokenizer), base, [prompt], settings)
    query = torch.tensor(tokenizer(prompt)["input_ids"])
    generator = Stream(0, Purpose.EVALUATION).torch()
    (response,) = sample(model, tokenizer, [query], settings, generator).responses
    assert tokenizer.decode(response).startswith(rollout.completions[0])
    policy, reference = tempered(model, query, response), tempered(base, query, response)
    kl = (policy.exp() * (policy - reference)).sum().item()
    sampled_kl = (policy - reference).gather(1, response[:, None]).sum().item()
    assert divergence.sampled_kl == pytest.approx(sampled_kl, rel=1e-4)
    assert divergence.kl == pytest.approx(kl, rel=1e-4)
    nll = -reference.gather(1, response[:, None]).sum().item()
    assert divergence.base_nll == pytest.approx(nll, rel=1e-4)


@pytest.mark.parametrize(
    "settings, warned",
    [
        ({"top_k": 5}, "top_k"),
        ({"top_p": 0.9}, "top_p"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"temperature": 0.7}, None),
    ],
)
def test_settings_that_make_samples_off_policy_warn_once(config, settings, warned, recwarn):
    config.sampling = SamplingConfig(3, 3, **settings)
    make_agents(config)
    messages = [str(w.message) for w in recwarn if "off-policy" in str(w.message)]
    assert len(messages) == (warned is not None)
    assert all(f"sampling.{warned}" in message for message in messages)
