"""Importance weights for an engine's samples, tested by the exact expected gradient of a tabular policy."""

import itertools

import pytest
import torch

from cory.config import Config, SamplingConfig
from cory.errors import UserError
from cory.learners.algorithms import GROUP_ALGORITHMS, ResponseTokens
from cory.learners.engine import compare_samples, importance_weights
from cory.learners.losses import ppo_losses
from cory.rollout import Rollout

VOCABULARY = 3


class Tabular:
    """A tabular policy, and an engine that samples from another one.

    Holds all responses of the given length, their log-probabilities (rows, length) under both policies, and rewards.
    """

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.responses = list(itertools.product(range(VOCABULARY), repeat=length))
        prefixes = {response[:end] for response in self.responses for end in range(length)}
        self.table = {
            prefix: torch.randn(VOCABULARY, generator=generator).double().requires_grad_()
            for prefix in sorted(prefixes)
        }
        noise = {prefix: torch.randn(VOCABULARY, generator=generator) for prefix in self.table}
        engine = {prefix: logits + 0.7 * noise[prefix] for prefix, logits in self.table.items()}
        self.logprobs = self.response_logprobs(self.table)
        self.engine_logprobs = self.response_logprobs(engine).detach()
        self.rewards = torch.randn(len(self.responses), generator=generator).double()

    def response_logprobs(self, table):
        rows = [
            [table[response[:t]].log_softmax(-1)[token] for t, token in enumerate(response)]
            for response in self.responses
        ]
        return torch.stack([torch.stack(row) for row in rows])

    def gradient(self, objective):
        parts = torch.autograd.grad(objective, list(self.table.values()), retain_graph=True)
        return torch.cat(parts)

    def expected(self):
        """Returns the exact gradient of the expected reward."""
        return self.gradient((self.logprobs.sum(1).exp() * self.rewards).sum())

    def by_engine(self, correction, cap, loss):
        """Returns a learner's ascent direction, as an expectation over the engine's samples."""
        gaps = (self.logprobs - self.engine_logprobs).detach()
        weights, _ = importance_weights(gaps, correction, cap)
        advantages = self.rewards[:, None] * weights * torch.ones_like(gaps)
        chances = self.engine_logprobs.sum(1).exp()
        return -self.gradient(loss(self.logprobs, advantages, chances))


def group_loss(algorithm):
    def loss(logprobs, advantages, chances):
        config = Config(algorithm=algorithm, sampling=SamplingConfig(1, logprobs.shape[1]))
        old, mask = logprobs.detach(), torch.ones_like(logprobs)
        tokens = ResponseTokens(logprobs, old, old, advantages, mask)
        losses = GROUP_ALGORITHMS[algorithm](config).losses(tokens, 0.0).losses
        # Dr. GRPO divides by the length limit, which the last factor undoes.
        return (chances * losses).sum() * (logprobs.shape[1] if algorithm == "dr_grpo" else 1)

    return loss


def ppo_loss(logprobs, advantages, chances):
    old, mask = logprobs.detach(), torch.ones_like(logprobs)
    return ppo_losses(
        logprobs=logprobs,
        values=0 * old,
        entropies=0 * old,
        old_logprobs=old,
        old_values=0 * old,
        advantages=advantages,
        returns=0 * old,
        mask=mask,
        weights=chances,
        cliprange=0.2,
        cliprange_value=0.2,
        vf_coef=0.1,
    ).loss


LOSSES = {"ppo": ppo_loss} | {name: group_loss(name) for name in ("dr_grpo", "rloo", "reinforce")}


@pytest.mark.parametrize("algorithm", LOSSES)
def test_an_uncapped_ratio_gives_the_gradient_of_the_policys_own_samples(algorithm):
    """Capped ratios and single-token ratios leave a bias that is smaller than without a correction."""
    tabular = Tabular(2)
    exact = tabular.expected()

    def bias(correction, cap):
        corrected = tabular.by_engine(correction, cap, LOSSES[algorithm])
        return ((corrected - exact).norm() / exact.norm()).item()

    assert bias("sequence_truncate", 1e9) < 1e-12
    assert bias("sequence_mask", 1e9) < 1e-12
    assert bias("none", 1.0) > 0.2
    assert 1e-6 < bias("sequence_truncate", 1.5) < bias("none", 1.0)
    if algorithm in ("ppo", "dr_grpo"):  # a single token's ratio leaves out the tokens before it
        assert 0.01 < bias("token_truncate", 1e9) < bias("none", 1.0)
        one_token = Tabular(1)
        corrected = one_token.by_engine("token_mask", 1e9, LOSSES[algorithm])
        torch.testing.assert_close(corrected, one_token.expected())


def test_capped_weights_and_reported_statistics():
    logprobs = torch.tensor([[-1.0, -1.0], [-1.0, -2.0], [-1.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    engine = [torch.tensor([-1.5, -1.2]), torch.tensor([-1.0, -1.8]), torch.tensor([-1.3])]
    rollout = Rollout([], [], [], [], logprobs=engine)

    def compare(correction, cap):
        sampling = SamplingConfig(engine_correction=correction, engine_correction_cap=cap)
        return compare_samples([rollout], logprobs, mask, sampling)

    ratios = torch.tensor([0.7, -0.2, 0.3]).exp()
    masked = compare("sequence_mask", 1.4)
    expected = torch.tensor([[0.0], [ratios[1]], [ratios[2]]])
    torch.testing.assert_close(masked.weights, expected)
    assert masked.ratio == pytest.approx(expected.mean().item())
    assert masked.capped == pytest.approx(1 / 3)
    assert masked.difference == pytest.approx((0.5 + 0.2 + 0.2 + 0.3) / 5)
    by_token = compare("token_truncate", 1.3)
    tokens = torch.tensor([[1.3, 1.2214], [1.0, 0.8187], [1.3, 1.0]])
    torch.testing.assert_close(by_token.weights, tokens, atol=1e-4, rtol=0)
    assert by_token.capped == pytest.approx(2 / 5)
    assert by_token.ratio == pytest.approx((1.3 + 1.2214 + 1.0 + 0.8187 + 1.3) / 5, abs=1e-4)
    assert (compare("none", 1.0).weights == 1).all()


@pytest.mark.parametrize(
    ("algorithm", "sampling"),
    [
        ("ppo", {"top_p": 0.9}),
        ("grpo", {"top_k": 5}),
        ("ppo", {"repetition_penalty": 1.1}),
        ("rloo", {"engine_correction": "token_mask"}),
        ("gspo", {"engine_correction": "token_truncate"}),
    ],
)
def test_a_correction_that_would_be_biased_is_refused(algorithm, sampling):
    config = Config(algorithm=algorithm, sampling=SamplingConfig(engine="vllm", **sampling))
    with pytest.raises(UserError, match=r"^sampling\.engine_correction: "):
        config.check()
    config.sampling.engine = "native"  # samples of the policy itself need no correction
    config.check()


def test_another_temperature_than_1_is_refused_with_an_engine():
    config = Config(sampling=SamplingConfig(engine="vllm", temperature=0.7))
    with pytest.raises(UserError, match=r"^sampling\.temperature: "):
        config.check()
