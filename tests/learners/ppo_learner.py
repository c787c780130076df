"""A PPO learner in double precision that records its advantages."""

import copy

import torch
from conftest import make_gpt2

from cory.config import Config, PPOConfig
from cory.learners.ppo import PolicyWithValueHead, PPOLearner


def policies(tokenizer, wrapper):
    """Returns a policy and a reference with different weights, in double precision.

    In single precision, Adam would turn rounding errors into steps where the gradient is zero (attention keys' biases).
    """
    base = make_gpt2(tokenizer).double()
    ref = make_gpt2(tokenizer, seed=1).double()
    torch.manual_seed(5)
    model, ref_model = (
        wrapper(copy.deepcopy(base)).double(),
        wrapper(ref).double().requires_grad_(False),
    )
    model.is_peft_model = ref_model.is_peft_model = False  # TRL's from_pretrained sets it
    return model, ref_model


def ppo_config(**settings):
    return PPOConfig(**{"learning_rate": 1e-3, "batch_size": 8, "mini_batch_size": 8} | settings)


def make_learner(tokenizer, precision="fp32", **settings):
    """Returns a learner, and a list to which it adds each batch's token values, advantages and returns."""
    config = Config(device="cpu", precision=precision, ppo=ppo_config(**settings))
    learner = PPOLearner(
        *policies(tokenizer, PolicyWithValueHead), tokenizer, config, torch.device("cpu")
    )
    seen = []
    original = learner.targets

    def targets(old, rewards, mask, rollouts):
        result = original(old, rewards, mask, rollouts)
        seen.append([x[mask.bool()] for x in (old.values, result.advantages, result.returns)])
        return result

    learner.targets = targets
    return learner, seen
