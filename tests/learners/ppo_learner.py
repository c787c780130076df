"""A PPO learner in double precision."""

import copy

import torch
from conftest import make_gpt2

from cory.config import Config, PPOConfig
from cory.learners.ppo import PolicyWithValueHead, PPOLearner


def policies(tokenizer, wrapper):
    """A policy and a reference, which differ from each other, in double precision.

    In double precision, as Adam turns the rounding errors of gradients that are zero (the keys' biases) into steps.
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
    """A learner, and what it computes of each batch: values, advantages and returns of response tokens."""
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
