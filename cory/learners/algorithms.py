"""The algorithms by name: the wrapper in which each trains a language model, and its learner."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from cory.config import Config
from cory.errors import one_of
from cory.learners import losses
from cory.learners.group import GroupLearner, WindowPolicy
from cory.learners.learner import Learner
from cory.learners.ppo import PPOLearner
from cory.learners.trl_parts import PolicyWithValueHead


class Algorithm(NamedTuple):
    """The wrapper in which an algorithm trains a language model, and its learner."""

    wrapper: type[PolicyWithValueHead] | type[WindowPolicy]
    learner: Callable[..., Learner]


ALGORITHMS = {
    "ppo": Algorithm(PolicyWithValueHead, PPOLearner),
    **dict.fromkeys(losses.ALGORITHMS, Algorithm(WindowPolicy, GroupLearner)),
}


def wrapper(algorithm: str) -> type[PolicyWithValueHead] | type[WindowPolicy]:
    """The wrapper in which `algorithm` trains a language model: with a value head for PPO, without
    for the others.

    Raises a UserError if there is no such algorithm.
    """
    one_of("algorithm", tuple(ALGORITHMS), algorithm)
    return ALGORITHMS[algorithm].wrapper


def make_learner(
    wrapped: PolicyWithValueHead | WindowPolicy,
    reference: torch.nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    device: torch.device,
) -> Learner:
    """Builds the learner for `config.algorithm`. `wrapped`: the policy in its `wrapper`."""
    learner = ALGORITHMS[config.algorithm].learner
    return learner(wrapped, reference, tokenizer, config, device)
