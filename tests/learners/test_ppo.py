"""The PPO learner against unmodified TRL, and its intended differences."""

import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl
from ppo_learner import make_learner, policies, ppo_config
from ragged import ragged, rollout_of, weights

import cory.learners.learner
from cory.config import Config
from cory.errors import NotFinite, UserError
from cory.learners import losses, memory
from cory.learners.ppo import trl_config
from cory.learners.records import BatchSizes
from cory.models.prefixes import share_prompts
from cory.rollout import Rollout

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
# Names of the learner's statistics, and TRL's names for them.
STATS = {
    "kl": "objective/kl",
    "kl_coef": "objective/kl_coef",
    "entropy": "ppo/policy/entropy",
    "policy_loss": "ppo/loss/policy",
    "value_loss": "ppo/loss/value",
    "clip_fraction": "ppo/policy/clipfrac",
    "response_tokens": "tokens/responses_len_mean",
}


class StockPolicy(trl.AutoModelForCausalLMWithValueHead):
    """TRL's policy with values in float32, like its logits; TRL's trainer cannot mix float32 and double."""

    def forward(self, **inputs):
        logits, loss, values = super().forward(**inputs)
        return logits, loss, values.float()


def make_stock(tokenizer, **settings):
    """Returns TRL's trainer for the policy of `make_learner`, and a list to which it adds the same values."""
    model, ref_model = policies(tokenizer, StockPolicy)
    config = trl_config(ppo_config(**settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trl.PPOTrainer(
            config=config, model=model, ref_model=ref_model, tokenizer=tokenizer
        )
    seen = []
    original = trainer.compute_advantages

    def compute_advantages(values, rewards, mask):
        result = original(values, rewards, mask)
        seen.append([x[mask.bool()] for x in result])
        return result

    trainer.compute_advantages = compute_advantages
    return trainer, seen


def steps(trainer, n=2):
    """Makes `n` updates and returns their statistics as dicts, with TRL's names for a TRL trainer."""
    stats = []
    for k in range(n):
        queries, responses, scores = ragged(seed=k)
        np.random.seed(k)  # TRL shuffles the rows with numpy's global generator
        if isinstance(trainer, trl.PPOTrainer):
            stats.append(trainer.step(queries, responses, list(scores)))
        else:
            (rollout_stats,) = trainer.update(
                [rollout_of(queries, responses)], [scores], np.random.RandomState(k)
            )
            stats.append(rollout_stats.metrics())
    return stats


@pytest.mark.parametrize(
    ("kl_penalty", "split"),
    [("full", {}), ("kl", {"mini_batch_size": 2, "gradient_accumulation_steps": 2})],
)
def test_equals_stock_trl(tokenizer, kl_penalty, split):
    tokenizer.padding_side = "right"
    stock, stock_seen = make_stock(tokenizer, kl_penalty=kl_penalty, **split)
    learner, learner_seen = make_learner(tokenizer, kl_penalty=kl_penalty, **split)
    assert type(learner.trainer) is trl.PPOTrainer
    before = weights(learner)
    learner_stats = steps(learner)
    for stock_stats, stats in zip(steps(stock), learner_stats, strict=True):
        for name, trl_name in STATS.items():
            assert stats[name] == pytest.approx(stock_stats[trl_name], rel=1e-5, abs=1e-7), name
    for stats, (values, _, returns) in zip(learner_stats, learner_seen, strict=True):
        explained = 1 - (returns - values).var() / returns.var()
        assert stats["explained_variance"] == pytest.approx(explained.item(), abs=1e-5)
    names = ("values", "advantages", "returns")
    for stock_batch, batch in zip(stock_seen, learner_seen, strict=True):
        for name, expected, values in zip(names, stock_batch, batch, strict=True):
            assert torch.allclose(expected, values, rtol=1e-5, atol=1e-6), name
    assert (weights(learner) - before).abs().max() > 1e-3
    update = (weights(learner) - before).norm()
    # The tolerance is relative to the update, not to the weights.
    assert (weights(stock) - weights(learner)).norm() <= 1e-5 * update


# Both KL penalties, one of them with mini-batches.
MINIS = pytest.mark.parametrize(
    ("kl_penalty", "split"),
    [("full", {}), ("kl", {"mini_batch_size": 4, "gradient_accumulation_steps": 2})],
)


def assert_same_update(a, b, tokenizer):
    """Asserts that both trainers take the same two steps, up to rounding."""
    before = weights(a)
    for a_stats, b_stats in zip(steps(a), steps(b), strict=True):
        assert a_stats == pytest.approx(b_stats, rel=1e-5, abs=1e-7)
    update = (weights(a) - before).norm()
    assert update > 1e-2
    assert (weights(a) - weights(b)).norm() <= 1e-5 * update


@MINIS
def test_micro_batches_change_no_number(tokenizer, kl_penalty, split):
    whole, _ = make_learner(tokenizer, kl_penalty=kl_penalty, **split)
    pieces, _ = make_learner(tokenizer, kl_penalty=kl_penalty, micro_batch=3, **split)
    assert_same_update(whole, pieces, tokenizer)


@MINIS
def test_reading_shared_prompts_once_changes_no_number(tokenizer, kl_penalty, split, monkeypatch):
    """Values and KL must come from the same positions as the logits. Branches, for example, share a prompt."""
    queries, responses, scores = ragged()
    queries = [queries[row // 4 * 4] for row in range(len(queries))]
    laid_out = []

    def share(*args):
        laid_out.append(share_prompts(*args))
        return laid_out[-1]

    results = []
    for layout_of_batch in (lambda model, batch: None, share):
        monkeypatch.setattr(cory.learners.learner, "share_prompts", layout_of_batch)
        learner, seen = make_learner(tokenizer, kl_penalty=kl_penalty, **split)
        before = weights(learner)
        rollout = rollout_of(queries, responses)
        (stats,) = learner.update([rollout], [scores], np.random.RandomState(0))
        results.append((stats.metrics(), torch.cat(seen[0]), weights(learner) - before))
    assert any(layout is not None for layout in laid_out)
    (plain_stats, plain_targets, plain_step), (stats, targets, step) = results
    assert stats == pytest.approx(plain_stats, rel=1e-5, abs=1e-7)
    assert torch.allclose(targets, plain_targets, rtol=1e-5, atol=1e-6)
    assert plain_step.norm() > 1e-2
    assert (step - plain_step).norm() <= 1e-5 * plain_step.norm()


@MINIS
def test_running_out_of_memory_makes_micro_batches_smaller(tokenizer, kl_penalty, split):
    fits = 1 if split else 3
    whole, _ = make_learner(tokenizer, kl_penalty=kl_penalty, **split)
    small, _ = make_learner(tokenizer, kl_penalty=kl_penalty, **split)
    forward = small.forward

    def limited(rows):
        result = forward(rows)
        if len(rows.input_ids) > fits and torch.is_grad_enabled():
            raise OUT_OF_MEMORY
        return result

    small.forward = limited
    with pytest.warns(UserWarning, match="ppo.micro_batch"):
        assert_same_update(whole, small, tokenizer)
    assert small.pass_size.micro_batch in (fits, fits - 1)


@pytest.mark.parametrize(
    ("error", "settings", "expected"),
    [
        (OUT_OF_MEMORY, {"micro_batch": 8}, OUT_OF_MEMORY),
        (OUT_OF_MEMORY, {}, UserError("ppo.micro_batch: expected memory for at least one row")),
        (RuntimeError("shapes do not fit"), {}, RuntimeError("shapes do not fit")),
    ],
)
def test_errors_that_smaller_micro_batches_cannot_avoid_are_raised(
    tokenizer, error, settings, expected
):
    learner, _ = make_learner(tokenizer, **settings)

    def fails(rows):
        raise error

    learner.forward = fails
    with warnings.catch_warnings(), pytest.raises(type(expected), match=str(expected)):
        warnings.simplefilter("ignore")
        steps(learner, 1)


@pytest.mark.parametrize(
    ("rows_within_limit", "settings", "rows"),
    [
        (3.5, {}, 3),
        (0.5, {}, 1),
        (100, {}, 8),
        (3.5, {"micro_batch": 5}, 5),
    ],
)
def test_auto_starts_with_as_many_rows_as_the_limit_allows(
    tokenizer, monkeypatch, rows_within_limit, settings, rows
):
    row = len(tokenizer) * Config().longest_response
    monkeypatch.setattr(memory, "LARGEST", {"cpu": int(rows_within_limit * row)})
    learner, _ = make_learner(tokenizer, **settings)
    assert learner.pass_size.micro_batch == rows


def test_a_ratio_above_the_threshold_drops_the_gradient(tokenizer):
    trainer, _ = make_learner(tokenizer, ratio_threshold=1e-3)
    before = weights(trainer)
    assert [stats["dropped_steps"] for stats in steps(trainer)] == [4, 4]
    assert torch.equal(weights(trainer), before)


def test_bf16_is_near_fp32(tokenizer):
    (full, _), (half, _) = (
        make_learner(tokenizer, precision=precision) for precision in ("fp32", "bf16")
    )
    for trainer in (full, half):
        trainer.model.float()
        trainer.reference.float()
    for half_stats, full_stats in zip(steps(half), steps(full), strict=True):
        assert half_stats["kl"] == pytest.approx(full_stats["kl"], rel=0.1)
        assert half_stats["kl"] != full_stats["kl"]
    assert weights(half).dtype == torch.float32


def test_the_kl_coefficient_changes_equally_for_one_role_and_two(tokenizer):
    """The KL horizon counts `ppo.batch_size` responses per update, however many roles the agent has."""
    coefficients = []
    for roles in (1, 2):
        learner, _ = make_learner(tokenizer)
        queries, responses, scores = ragged()
        rollout = rollout_of(queries, responses)
        learner.update([rollout] * roles, [scores] * roles, np.random.default_rng(0))
        coefficients.append(learner.kl_controller.value)
    assert coefficients[0] == pytest.approx(coefficients[1], rel=1e-9) != learner.ppo.init_kl_coef


def test_rollouts_of_an_update_have_their_own_kl_and_length(tokenizer):
    """An agent in two roles makes one update on both rollouts. KL and length are reported by role."""
    learner, _ = make_learner(tokenizer)
    rows = [ragged(seed=k) for k in range(2)]
    expected = []
    for queries, responses, _ in rows:
        kls = learner.response_kls(rollout_of(queries, responses))
        expected.append((sum(kls) / 8, sum(map(len, responses)) / 8))
    stats = learner.update(
        [rollout_of(*row[:2]) for row in rows], [row[2] for row in rows], np.random.default_rng(0)
    )
    assert [(role.kl, role.response_tokens) for role in stats] == [
        pytest.approx(pair) for pair in expected
    ]
    assert stats[0].policy_loss == stats[1].policy_loss and stats[0].kl != stats[1].kl


def test_a_role_that_earns_more_has_no_advantage_over_another(tokenizer):
    """A role's advantages are the same in a joint update of two roles and in an update on that role alone."""
    offsets = [0.0, 5.0]
    rollouts, rewards = [], []
    for k, offset in enumerate(offsets):
        queries, responses, scores = ragged(seed=k)
        rollouts.append(rollout_of(queries, responses))
        rewards.append(scores + offset)

    def advantages(rollouts, rewards):
        """Returns the advantages of all response tokens in a new learner's update."""
        learner, seen = make_learner(tokenizer)
        learner.update(rollouts, rewards, np.random.default_rng(0))
        ((_, token_advantages, _),) = seen
        return token_advantages

    both = advantages(rollouts, rewards)
    alone = [advantages([rollouts[role]], [rewards[role]]) for role in range(2)]
    assert torch.allclose(both, torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert [one_role.sum().item() for one_role in alone] == pytest.approx([0, 0], abs=1e-3)


def test_a_number_that_is_not_finite_raises_before_a_step(tokenizer):
    """The error names the agent and its roles."""
    learner, _ = make_learner(tokenizer)
    before = weights(learner)
    rollouts, rewards = [], []
    for k, role in enumerate(("pioneer", "observer")):
        queries, responses, scores = ragged(seed=k)
        texts = [""] * 8
        rollouts.append(Rollout(texts, texts, queries, responses, agent="agent_1", role=role))
        rewards.append(scores)
    rewards[1][3] = math.nan  # forward passes stay finite, advantages do not
    with pytest.raises(NotFinite, match="agent_1 as pioneer and observer"):
        learner.update(rollouts, rewards, np.random.default_rng(0))
    assert torch.equal(weights(learner), before)


@pytest.mark.parametrize(
    "settings", [{"reward_scaling": True}, {"reward_scaling": True, "reward_normalization": True}]
)
def test_reward_scaling_uses_the_running_moments(tokenizer, settings):
    trainer, _ = make_learner(tokenizer, **settings)
    scaled_rewards = []
    targets = trainer.targets
    trainer.targets = lambda old, rewards, *args: (
        scaled_rewards.append(rewards) or targets(old, rewards, *args)
    )
    scores = [ragged(seed=k)[2] for k in range(2)]
    steps(trainer)
    seen = torch.cat(scores)
    centre = seen.mean() if "reward_normalization" in settings else 0
    assert torch.allclose(scaled_rewards[1], (scores[1] - centre) / seen.std(), rtol=1e-4)


def test_equal_rewards_are_not_scaled_by_a_deviation_of_zero(tokenizer):
    """Otherwise, scaled rewards and value targets would be in the millions, for example if no response is right."""
    learner, _ = make_learner(tokenizer, reward_scaling=True)
    for _ in range(2):
        scaled, learner.reward_moments = learner._scale(torch.full((8,), -0.3))
        assert torch.allclose(scaled, torch.full((8,), -0.3))
    scaled, _ = learner._scale(torch.linspace(-1, 1, 8))
    assert scaled.abs().max() > 1


def test_gradients_are_clipped_at_every_step(tokenizer):
    trainer, _ = make_learner(tokenizer, max_grad_norm=1e-3)
    norms = []
    step = trainer.optimizer.step

    def spy(*args, **kwargs):
        norms.append(
            torch.stack([p.grad.norm() for p in trainer.model_params if p.grad is not None])
            .norm()
            .item()
        )
        return step(*args, **kwargs)

    trainer.optimizer.step = spy
    steps(trainer, 1)
    assert len(norms) == 4
    assert norms == pytest.approx([1e-3] * 4, rel=1e-3)


def test_padding_does_not_change_advantages():
    """GAE in a padded batch equals a plain loop over single responses."""
    gamma, lam, lengths = 0.9, 0.8, [2, 5]
    values, rewards = torch.randn(2, 2, 5, dtype=torch.float64)
    mask = torch.tensor([[1] * length + [0] * (5 - length) for length in lengths])
    tokens = mask.bool()

    expected = []
    for row, length in enumerate(lengths):
        for t in range(length):
            deltas = [
                rewards[row, k]
                + (gamma * values[row, k + 1] if k + 1 < length else 0)
                - values[row, k]
                for k in range(t, length)
            ]
            expected.append(sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas)))
    expected = torch.stack(expected)

    advantages, returns = losses.gae(values, rewards, mask, gamma, lam)
    assert torch.allclose(returns[tokens], expected + values[tokens], atol=1e-6)
    expected = (expected - expected.mean()) / expected.std()
    assert torch.allclose(advantages[tokens], expected, atol=1e-6)


def test_whitening_does_not_amplify_the_kls_noise_if_all_scores_are_equal(tokenizer):
    """The first of two roles earns 0 in every response, so its advantages stay as small as the KL penalty."""
    rows, length = 24, 12
    learner, _ = make_learner(tokenizer, init_kl_coef=0.05)
    responses = [torch.zeros(length, dtype=torch.long)] * rows
    rollouts = [rollout_of(responses, responses)] * 2
    kl = 1e-3 * torch.randn(2 * rows, length, generator=torch.Generator().manual_seed(0))
    old = SimpleNamespace(values=torch.zeros(2 * rows, length), kl=kl)
    rewards = torch.cat([torch.zeros(rows), torch.randn(rows)])
    mask = torch.ones(2 * rows, length, dtype=torch.long)
    targets = learner.targets(old, rewards, mask, rollouts)
    advantages, returns = targets.advantages, targets.returns

    decay = learner.ppo.gamma * learner.ppo.lam
    penalty = -0.05 * kl[:rows]
    expected = torch.stack(
        [penalty[:, t:] @ (decay ** torch.arange(length - t)) for t in range(length)], 1
    )
    assert torch.allclose(returns[:rows], expected, atol=1e-7)
    assert torch.allclose(advantages[:rows], expected - expected.mean(), atol=1e-7)
    assert advantages[:rows].std() < 1e-3
    assert advantages[rows:].std() == pytest.approx(1.0, abs=1e-3)


def test_mini_batches_of_one_token(tokenizer):
    """The values of a mini-batch with one token have no variance, and the update stays finite."""
    trainer, _ = make_learner(tokenizer, mini_batch_size=1)
    before, (queries, responses, scores) = weights(trainer), ragged()
    rollout = rollout_of(queries, [response[:1] for response in responses])
    (stats,) = trainer.update([rollout], [scores], np.random.default_rng(0))
    assert stats.value_loss > 0 and math.isfinite(stats.policy_loss)
    assert not torch.equal(weights(trainer), before)


def test_explained_variance_of_a_hand_worked_case():
    """The returns 1, 2, 3 have variance 1, the errors 0, 0.5, -0.5 have 0.25. The fourth token is masked."""
    returns, values = torch.tensor([[1.0, 2.0, 3.0, 9.0]]), torch.tensor([[1.0, 1.5, 3.5, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    assert losses.explained_variance(values, returns, mask).item() == pytest.approx(0.75)
    # A constant critic explains nothing. A critic that is worse than a constant has a negative value.
    assert losses.explained_variance(torch.full_like(values, 7.0), returns, mask).item() == 0
    assert losses.explained_variance(-returns, returns, mask).item() == pytest.approx(-3)
    assert losses.explained_variance(values, torch.ones_like(returns), mask).isnan()


def test_a_ratio_that_overflows_at_padding_is_ignored():
    """The second of two positions is padding, and the policies differ by 94 nats there."""
    names = ("logprobs", "values", "entropies", "old_values", "advantages", "returns")
    terms = losses.ppo_losses(
        **dict.fromkeys(names, torch.zeros(1, 2)),
        old_logprobs=torch.tensor([[0.0, -94.0]]),
        mask=torch.tensor([[1.0, 0.0]]),
        weights=torch.ones(1),
        cliprange=0.2,
        cliprange_value=0.2,
        vf_coef=0.1,
    )
    assert terms.ratio == 1 and torch.isfinite(terms.vector()).all()


@pytest.mark.parametrize(
    "ratio, advantage, clips", [(1.25, 1.0, False), (1.3, 1.0, True), (0.75, -1.0, True)]
)
def test_cliprange_high_is_the_range_above_1(tokenizer, ratio, advantage, clips):
    """Group learners clip in the same way, and test_trl_formulas compares them with TRL."""
    learner, _ = make_learner(tokenizer, cliprange_high=0.28)
    one = torch.ones(1, 1)
    rows = SimpleNamespace(
        old=SimpleNamespace(logprobs=0 * one, values=one),
        targets=SimpleNamespace(advantages=advantage * one, returns=one),
        mask=one,
        weights=one[0],
    )
    new = SimpleNamespace(logprobs=torch.full((1, 1), ratio).log(), values=one)
    terms = learner.loss_terms(new, one, rows, BatchSizes(one.sum(), responses=1))
    limit = min(max(ratio, 0.8), 1.28)
    assert terms.policy_loss.item() == pytest.approx(-advantage * (limit if clips else ratio))
    assert terms.clip_fraction.item() == clips
