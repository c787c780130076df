"""Agents apart: each lives in one process, which samples and learns with it; the others know its texts and numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState

from cory.config import Config
from cory.models.rollout import Rollout
from cory.models.sampling import encode
from cory.parallel import distributed


def is_here(index: int) -> bool:
    """Whether the agent of this index, from 0, lives in this process."""
    return distributed.parallel.agents == "together" or index % distributed.run_size() == distributed.rank()


class Apart:
    """An agent that lives in one process, as all of them see it: `cory.agent.Agent` has its methods.

    Args:
        index: from 0. agent: itself in its process, None in the others. config: the run's settings.
    """

    def __init__(self, index: int, agent: Any, config: Config) -> None:
        self.name, self.owner, self.agent = f"agent_{index + 1}", index % distributed.run_size(), agent
        self.chat_template = config.of_agent(index).model.chat_template
        tokenizer_and_length = (agent.tokenizer, agent.context_length) if agent else None
        self.tokenizer, self.context_length = distributed.broadcast(tokenizer_and_length, self.owner)
        self.device = PartialState().device

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps taken in this process."""
        return self.agent.optimizer_steps if self.agent else 0

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts, as the policy reads them."""
        return encode(self.tokenizer, prompts, self.chat_template)

    def check_model(self) -> None:
        """Checks the agent's policy, in the agent's process."""
        if self.agent:
            self.agent.check_model()

    def respond(self, prompts: list[Any], max_new_tokens: int, generator: torch.Generator) -> Any:
        """The agent's rollout; in other processes without token ids, as only its texts are sent."""
        kept = []

        def answer() -> Any:
            kept.append(self.agent.respond(prompts, max_new_tokens, generator))
            return replace(kept[0], prompt_ids=[], response_ids=[])

        texts = distributed.computed_by(self.owner, answer)
        return kept[0] if kept else texts

    def learn(
        self,
        rollouts: Sequence[Rollout],
        rewards: Sequence[torch.Tensor],
        shuffle: np.random.Generator,
        rate: float = 1.0,
    ) -> list[Any]:
        """One update, in the agent's process; None for each rollout in the others."""
        if self.agent:
            return self.agent.learn(rollouts, rewards, shuffle, rate)
        return [None for _ in rollouts]

    def explain(self, rollout: Any) -> list[dict[str, Any]]:
        """What is recorded of each response; in all processes."""
        return distributed.computed_by(self.owner, lambda: self.agent.explain(rollout))

    def restart(self) -> None:
        """Resets optimizer state, KL coefficient and reward moments."""
        if self.agent:
            self.agent.restart()

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The trained state for a checkpoint; nothing in other processes."""
        return self.agent.state() if self.agent else ({}, {})

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        if self.agent:
            self.agent.load_state(tensors, numbers)

    def save(self, folder: Path) -> None:
        """Writes the policy and its tokenizer."""
        if self.agent:
            self.agent.save(folder)
