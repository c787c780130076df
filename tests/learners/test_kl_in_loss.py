"""The gradient of the KL in the loss is that of the KL to the reference, by enumeration of all outcomes."""

import itertools

import pytest
import torch

from cory.learners import losses

VOCABULARY = 4


class Tables(torch.nn.Module):
    """A policy over two tokens: logits of the first, and of the second given the first."""

    def __init__(self, seed, scale=1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = [(VOCABULARY,), (VOCABULARY, VOCABULARY)]
        self.logits = torch.nn.ParameterList(
            [
                scale * torch.randn(shape, generator=generator, dtype=torch.float64)
                for shape in shapes
            ]
        )

    def token_logprobs(self, responses):
        """(responses, tokens)."""
        first = self.logits[0].log_softmax(-1)[responses[:, 0]]
        if responses.shape[1] == 1:
            return first[:, None]
        second = self.logits[1].log_softmax(-1)[responses[:, 0], responses[:, 1]]
        return torch.stack([first, second], 1)


def outcomes(tokens):
    return torch.tensor(list(itertools.product(range(VOCABULARY), repeat=tokens)))


def expected_gradient(policy, old, reference, tokens, algorithm):
    """Of the loss without advantages, over all responses with their probabilities under `old`, times the divisor."""
    responses = outcomes(tokens)
    old_logprobs = old.token_logprobs(responses).detach()
    mask = torch.ones_like(old_logprobs)
    weights = old_logprobs.sum(1).exp()
    terms = losses.group_losses(
        logprobs=policy.token_logprobs(responses),
        entropies=mask,
        old_logprobs=old_logprobs,
        ref_logprobs=reference.token_logprobs(responses).detach(),
        advantages=torch.zeros_like(mask),
        mask=mask,
        weights=weights,
        algorithm=algorithm,
        cliprange=0.2,
        max_new_tokens=tokens,
        kl_coef=1.0,
    )
    divisor = {"grpo": tokens, "dr_grpo": tokens}.get(algorithm, 1)
    return torch.autograd.grad(terms.loss * divisor, list(policy.logits), allow_unused=True)


def kl_gradient(policy, old, reference, tokens):
    """Of the sum of each token's KL(policy, reference) after what `old` has written."""
    first = policy.logits[0].log_softmax(-1)
    kl = (first.exp() * (first - reference.logits[0].log_softmax(-1))).sum()
    if tokens == 2:
        second = policy.logits[1].log_softmax(-1)
        of_second = (second.exp() * (second - reference.logits[1].log_softmax(-1))).sum(1)
        kl = kl + (old.logits[0].softmax(-1).detach() * of_second).sum()
    return torch.autograd.grad(kl, list(policy.logits), allow_unused=True)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo"])
def test_its_expectation_is_the_gradient_of_the_kl(algorithm, tokens, on_policy):
    """That of the tokens' KLs after what was written."""
    policy, reference = Tables(0), Tables(1)
    old = Tables(0) if on_policy else Tables(2)
    found = expected_gradient(policy, old, reference, tokens, algorithm)
    expected = kl_gradient(policy, old, reference, tokens)
    for a, b in zip(found[:tokens], expected[:tokens], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        assert b.abs().max() > 1e-2


def test_that_of_k3_alone_is_another():
    """So that the test above could fail: without the ratio, the expected gradient is not the KL's, even on-policy."""
    policy, reference = Tables(0), Tables(1)
    responses = outcomes(1)
    logprobs = policy.token_logprobs(responses)[:, 0]
    gap = reference.token_logprobs(responses)[:, 0].detach() - logprobs
    loss = (logprobs.detach().exp() * (gap.exp() - gap - 1)).sum()
    (found,) = torch.autograd.grad(loss, policy.logits[0])
    (expected, _) = kl_gradient(policy, policy, reference, 1)
    assert (found - expected).abs().max() > 0.1 * expected.abs().max()
