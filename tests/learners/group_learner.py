"""A group learner of plain gradient steps, and log-probabilities by plain passes over single responses."""

import numpy as np
import torch
from conftest import make_gpt2
from ragged import rollout_of

from cory.config import Config, PPOConfig, SamplingConfig
from cory.learners.group import GroupLearner
from cory.models.window import WindowPolicy

LONGEST, GROUP = 12, 4


def make(tokenizer, algorithm, **settings):
    """A learner in double precision, with a reference that differs from its policy.

    It makes plain gradient steps, in which the gradient shows.
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
    """The statistics of an update on one rollout."""
    rollout = rollout_of(queries, responses, finished)
    (stats,) = learner.update([rollout], [scores], np.random.default_rng(seed))
    return stats


def all_logprobs(model, query, response, temperature=1.0):
    """(tokens, vocabulary), of one response, without padding or batches."""
    logits = model(torch.cat([query, response])[None]).logits[0, len(query) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def logprobs(model, query, response):
    """Of its tokens."""
    return all_logprobs(model, query, response).gather(1, response[:, None])[:, 0]
