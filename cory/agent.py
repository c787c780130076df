"""An agent: one LLM with its learner. It keeps its weights and optimizer for the whole run, whatever its role."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from cory.config import Config
from cory.learners.learner import Learner
from cory.learners.stats import UpdateStats
from cory.models.families import check_model
from cory.models.lora import (
    LanguageModel,
    activate,
    save_policy,
    without_adapters,
)
from cory.models.rollout import Rollout
from cory.models.sample import sample
from cory.models.text import (
    are_turns,
    check_lengths,
    context_length,
    encode,
    end_tokens,
    plain_texts,
)
from cory.models.vllm import Engine
from cory.parallel import distributed, sharding
from cory.parallel.devices import autocast
from cory.prompts import Prompt


class Agent:
    """One LLM that answers prompts and learns from rewards.

    Args:
        name: `agent_1`, ...; names its folder, its metrics and its adapter.
        policy: the causal language model, with the adapters of all agents that share it.
        tokenizer: of the policy.
        config: the run's settings.
        device: where the agent samples and learns.
        learner: trains the policy. None: the agent is frozen. It answers without the adapters of others, and as it is
            its own reference, its KL is 0.
        engine: samples in place of the policy.
    """

    def __init__(
        self,
        name: str,
        policy: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        device: torch.device,
        learner: Learner | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self.tokenizer = tokenizer
        self.config = config
        self.device = device
        self.learner = learner
        self.engine = engine
        self.chat_template = config.model.chat_template
        self.context_length = context_length(policy)  # in tokens; None if unknown
        if engine is not None:
            self.context_length = min(
                self.context_length or engine.context_length, engine.context_length
            )

    @property
    def is_trained(self) -> bool:
        """Whether the agent learns; others are frozen."""
        return self.learner is not None

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps in this process, also of those left out as they were not finite."""
        return 0 if self.learner is None else self.learner.optimizer_steps

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of prompts, as the policy reads them."""
        return encode(self.tokenizer, prompts, self.chat_template)

    def activate(self) -> None:
        """Activates this agent's adapter if agents share a base. A frozen agent has none."""
        if self.is_trained:
            activate(self.policy, self.name)

    def check_model(self) -> None:
        """Raises a UserError if the policy is wrong in padded batches."""
        with self._answering():
            check_model(self.policy, self.tokenizer, samples=self.engine is None)

    def respond(
        self,
        prompts: list[Prompt],
        max_new_tokens: int,
        generator: torch.Generator,
        stop: list[str] | None = None,
    ) -> Rollout:
        """Samples a response of at most `max_new_tokens` tokens per prompt.

        Args:
            prompts: text or chat messages.
            generator: draws the tokens, unless an engine does, whose random numbers are its own.
            stop: texts that end a response; None: those of the settings.

        Raises a UserError if a prompt is too long.
        """
        sampling = self.config.sampling
        if stop is not None:
            sampling = replace(sampling, stop=stop)
        prompt_ids = [torch.tensor(ids, dtype=torch.long) for ids in self.encode(prompts)]
        check_lengths(
            [len(ids) for ids in prompt_ids], max_new_tokens, self.context_length, prompts
        )
        logprobs: list[torch.Tensor] = []  # by the engine
        if self.engine is None:
            with self._answering():
                response_ids = sample(
                    self.policy, self.tokenizer, prompt_ids, sampling, max_new_tokens, generator
                ).responses
        else:
            self.activate()
            response_ids, logprobs = self.engine.sample(
                self.name,
                self.policy,
                prompt_ids,
                max_new_tokens,
                end_tokens(self.policy, self.tokenizer),
                sampling.stop,
            )
        turn = are_turns(prompts, self.chat_template)
        completions = plain_texts(self.tokenizer, response_ids, sampling.stop, turn)
        return Rollout(prompts, completions, prompt_ids, response_ids, logprobs, agent=self.name)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """The policy as it answers: without dropout, and with no adapter but the agent's own."""
        self.policy.eval()
        self.activate()
        with (
            autocast(self.device, self.config.precision),
            nullcontext() if self.is_trained else without_adapters(self.policy),
            sharding.gathered(self.policy),
        ):
            yield

    def learn(
        self,
        rollouts: Sequence[Rollout],
        rewards: Sequence[torch.Tensor],
        shuffle: np.random.Generator,
        lr_factor: float = 1.0,
    ) -> list[UpdateStats]:
        """One update on the agent's rollouts, one per role; returns the statistics of each.

        Args:
            rewards: of each rollout, the (batch,) training rewards.
            shuffle: draws the order of the rows in each epoch.
            lr_factor: factor of the learning rate.

        Raises NotFinite, which names agent and role, if a loss or gradient is not finite. A frozen
        agent learns nothing, and its statistics have the rest.
        """
        if self.learner is None:
            return [
                UpdateStats(kl=0.0, response_tokens=_mean_length(rollout, self.device))
                for rollout in rollouts
            ]
        self.activate()
        self._mark_engine_outdated()
        self.learner.scale_learning_rate(lr_factor)
        return self.learner.update(rollouts, rewards, shuffle)

    def response_kls(self, rollout: Rollout) -> list[float]:
        """The KL of each response to the reference, in nats."""
        if self.learner is None:
            return [0.0] * len(rollout.response_ids)
        self.activate()
        return self.learner.response_kls(rollout)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The trained state for a checkpoint: weights and the optimizer's state as tensors, other numbers as JSON.

        A frozen agent has none.
        """
        return ({}, {}) if self.learner is None else self.learner.save_state()

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Restores what `state` returned. Raises a ValueError if a tensor does not fit."""
        if self.learner is not None:
            self._mark_engine_outdated()
            self.learner.load_state(tensors, numbers)

    def _mark_engine_outdated(self) -> None:
        if self.engine is not None:
            self.engine.outdated(self.name)

    def restart(self) -> None:
        """Resets optimizer state, KL coefficient and reward moments (`cory.reset_every`)."""
        if self.learner is not None:
            self.learner.restart()

    def save(self, folder: Path) -> None:
        """Writes the policy and its tokenizer as a Hugging Face or PEFT folder, without the value head."""
        self.activate()
        if save_policy(self.policy, folder, self.name if self.is_trained else None):
            self.tokenizer.save_pretrained(folder)


def _mean_length(rollout: Rollout, device: torch.device) -> float:
    """The mean length of its responses in tokens, over the rows of all processes."""
    tokens = sum(len(ids) for ids in rollout.response_ids)
    sums = distributed.all_reduce_sum(
        torch.tensor([tokens, len(rollout.response_ids)], device=device)
    )
    return (sums[0] / sums[1]).item()
