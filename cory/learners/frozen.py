"""A policy that answers and stays as it is, in the place of a learner (`agents: [{trained: false}]`)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cory.config import Config, SamplingConfig
from cory.learners.group import WindowPolicy
from cory.learners.stats import UpdateStats
from cory.models.families import check_model
from cory.models.lora import LanguageModel
from cory.models.rollout import Rollout
from cory.models.sampling import sample
from cory.parallel import distributed, sharding


class Frozen:
    """Has a learner's methods, but no optimizer and no state. The policy is its own reference, so
    its KL is 0.

    Args:
        model: the policy in its wrapper, which may be the reference of trained agents, or carry
            their adapters; it answers without them.
        tokenizer: of the policy.
        config: the run's settings.
        device: where it computes.
    """

    optimizer_steps = 0

    def __init__(
        self,
        model: WindowPolicy,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        device: torch.device,
    ) -> None:
        self.policy: LanguageModel = sharding.placed(model, device).pretrained_model
        self.tokenizer = tokenizer
        self.config = config
        self.device = device

    def generate(
        self,
        prompt_ids: Sequence[Tensor],
        settings: SamplingConfig,
        max_new_tokens: int,
        generator: torch.Generator,
    ) -> list[Tensor]:
        """Samples one response per prompt, in one batch. See `sample`."""
        with self._as_base(), sharding.gathered(self.policy, self.config.parallel.gather):
            return sample(
                self.policy, self.tokenizer, prompt_ids, settings, max_new_tokens, generator
            ).responses

    def check_model(self, samples: bool) -> None:
        """Raises a UserError if the policy is not right in padded batches; see `families.check_model`."""
        with self._as_base(), sharding.gathered(self.policy, self.config.parallel.gather):
            check_model(self.policy, self.tokenizer, samples)

    def scale_learning_rate(self, factor: float) -> None:
        """Nothing: there is no learning rate."""

    def update(
        self, rollouts: Sequence[Rollout], rewards: Sequence[Tensor], shuffle: np.random.Generator
    ) -> list[UpdateStats]:
        """Learns nothing; the statistics of each rollout, over all processes."""
        return [
            UpdateStats(kl=0.0, response_tokens=self._mean_length(rollout)) for rollout in rollouts
        ]

    def _mean_length(self, rollout: Rollout) -> float:
        tokens = sum(len(ids) for ids in rollout.response_ids)
        sums = distributed.all_reduce_sum(
            torch.tensor([tokens, len(rollout.response_ids)], device=self.device)
        )
        return (sums[0] / sums[1]).item()

    def log_ratios(self, rollout: Rollout) -> tuple[list[float], Tensor]:
        """Each response's KL to the reference, and (rows, R) log(pi / pi_0) of its tokens: all 0."""
        lengths = [len(ids) for ids in rollout.response_ids]
        return [0.0 for _ in lengths], torch.zeros(len(lengths), max(lengths, default=0))

    def restart(self) -> None:
        """Nothing: there is no optimizer."""

    def save_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Nothing, as the settings name all there is."""
        return {}, {}

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Nothing."""

    @contextmanager
    def _as_base(self) -> Iterator[None]:
        """The policy without adapters of agents that share it, and without dropout."""
        self.policy.eval()
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"
        ):
            if isinstance(self.policy, PeftModel):
                with self.policy.disable_adapter():
                    yield
            else:
                yield
