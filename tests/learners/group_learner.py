"""A group learner that takes plain gradient steps, and log-probabilities that are computed response by response."""

import numpy as np
import torch
from conftest import make_gpt2
from ragged import rollout_of

from cory.config import Config, PPOConfig, SamplingConfig
from cory.learners.group import GroupLearner
from cory.models.window import WindowPolicy

LONGEST, GROUP = 12, 4


def make(tokenizer, algorithm, **settings):
    """Returns a learner in double precision whose reference differs from its policy.

    It steps with SGD, so that a test can read the gradient from the change of the weights.
    """
    policy = WindowPolicy(make_gpt2(tokenizer).double())
    reference = WindowPolicy(make_gpt2(tokenizer, seed=1).double()).requires_grad_(False)
    defaults = {"batch_size": 8, "mini_batch_size": 8, "ppo_epochs": 2, "learning_rate": 0.01}
    ppo = PPOConfig(**defaults | settings)
    sampling = SamplingConfig(max_new_tokens=LONGEST)
    config = Config(device="cpu", algorithm=algorithm, group_size=GROUP, ppo=ppo, sampling=sampling)
    learner = GroupLearner(policy, reference, tokenizer, config, torch.device("cpu"))
    learner.optimizer = torch.optim.SGD(learner.model_params, lr=learner.ppo.learning_rate)
    return learner


def update(learner, queries, responses, scores, finished=None, seed=0):
    """Updates the learner on one rollout and returns the statistics."""
    rollout = rollout_of(queries, responses, finished)
    (stats,) = learner.update([rollout], [scores], np.random.default_rng(seed))
    return stats


def all_logprobs(model, query, response, temperature=1.0):
    """Returns the log-probabilities (tokens, vocabulary) along one response, without padding or batches."""
    logits = model(torch.cat([query, response])[None]).logits[0, len(query) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def logprobs(model, query, response):
    """Returns the log-probabilities (tokens,) of the response's tokens."""
    return all_logprobs(model, query, response).gather(1, response[:, None])[:, 0]
