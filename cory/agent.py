"""An agent: one LLM with its learner. It keeps its weights and optimizer for the whole run, whatever its role."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from cory.config import Config
from cory.learners.frozen import Frozen
from cory.learners.learner import Learner
from cory.learners.stats import UpdateStats
from cory.models.engine import Engine
from cory.models.lora import LanguageModel, activate, save_policy, save_without_adapters
from cory.models.rollout import Rollout
from cory.models.static import check_static
from cory.models.tokenization import (
    are_turns,
    check_lengths,
    context_length,
    encode,
    end_tokens,
    plain_texts,
)
from cory.models.tokens import token_record
from cory.prompts import Prompt


class Agent:
    """One LLM that answers prompts and learns from rewards.

    Args:
        name: `agent_1`, ...; names its folder and its metrics.
        learner: has the policy. `Frozen`: the agent answers and does not learn.
        config: the run's settings.
        engine: samples in place of the policy.
    """

    def __init__(
        self,
        name: str,
        learner: Learner | Frozen,
        config: Config,
        engine: Engine | None = None,
    ) -> None:
        self.name = name
        self.learner = learner
        self.is_trained = not isinstance(learner, Frozen)
        self.sampling = config.sampling
        self.chat_template = config.model.chat_template
        self.merge = config.lora.merge
        self.engine = engine
        self.context_length = context_length(self.policy)  # in tokens; None if unknown
        if engine is not None:
            self.context_length = min(
                self.context_length or engine.context_length, engine.context_length
            )

    @property
    def policy(self) -> LanguageModel:
        """The causal language model, with the adapters of all agents that share it."""
        return self.learner.policy

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's."""
        return self.learner.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the agent samples and learns."""
        return self.learner.device

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps in this process, also of those left out as they were not finite."""
        return self.learner.optimizer_steps

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of prompts, as the policy reads them."""
        return encode(self.tokenizer, prompts, self.chat_template)

    def activate(self) -> None:
        """Activates this agent's adapter if agents share a base. A frozen agent has none."""
        if self.is_trained:
            activate(self.policy, self.name)

    def check_model(self) -> None:
        """Raises a UserError if the policy is wrong in padded batches, or cannot sample with `sampling.cache`."""
        self.activate()
        self.learner.check_model(samples=self.engine is None)
        if self.sampling.cache == "static":
            check_static(self.policy, self.device)

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
        sampling = self.sampling if stop is None else replace(self.sampling, stop=stop)
        prompt_ids = [torch.tensor(ids, dtype=torch.long) for ids in self.encode(prompts)]
        check_lengths(
            [len(ids) for ids in prompt_ids], max_new_tokens, self.context_length, prompts
        )
        self.activate()
        logprobs: list[torch.Tensor] = []
        if self.engine is None:
            response_ids = self.learner.generate(prompt_ids, sampling, max_new_tokens, generator)
        else:
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

        Raises NotFinite, which names agent, role and rows, if a loss or gradient is not finite
        (`guards.on_nonfinite`).
        """
        self.activate()
        self._mark_engine_outdated()
        self.learner.scale_learning_rate(lr_factor)
        return self.learner.update(rollouts, rewards, shuffle)

    def explain(self, rollout: Rollout) -> list[dict[str, Any]]:
        """Of each response its `kl` to the reference, and its `token_texts` with `log_ratios` (docs/metrics.md)."""
        self.activate()
        kls, log_ratios = self.learner.log_ratios(rollout)
        return [
            token_record(self.tokenizer, ids, kl, ratios)
            for ids, kl, ratios in zip(rollout.response_ids, kls, log_ratios, strict=True)
        ]

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The trained state for a checkpoint: weights and the optimizer's state as tensors, other numbers as JSON."""
        return self.learner.save_state()

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Restores what `state` returned. Raises a ValueError if a tensor does not fit."""
        self._mark_engine_outdated()
        self.learner.load_state(tensors, numbers)

    def _mark_engine_outdated(self) -> None:
        if self.engine is not None:
            self.engine.outdated(self.name)

    def restart(self) -> None:
        """Resets optimizer state, KL coefficient and reward moments (`cory.reset_every`)."""
        self.learner.restart()

    def save(self, folder: Path) -> None:
        """Writes the policy and its tokenizer as a Hugging Face or PEFT folder, without the value head."""
        self.activate()
        if self.is_trained:
            saved = save_policy(self.policy, folder, self.name, self.merge)
        else:
            saved = save_without_adapters(self.policy, folder)
        if saved:
            self.tokenizer.save_pretrained(folder)
