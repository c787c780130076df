"""An agent: one LLM that answers and learns. Training, evaluation and chat sample through `Agent.respond`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from cory.config import Config, SamplingConfig
from cory.learners.learner import Learner
from cory.learners.memory import PassSize
from cory.learners.records import UpdateStats
from cory.models.families import check_model
from cory.models.lora import LanguageModel, activate, save_policy, without_adapters
from cory.models.prefixes import response_logits
from cory.models.sample import ends_response, sample
from cory.models.text import (
    are_turns,
    check_lengths,
    context_length,
    encode,
    encode_responses,
    end_tokens,
    pad_token,
    plain_texts,
    reader,
    turn_stop,
)
from cory.models.vllm import Engine
from cory.models.window import pad
from cory.parallel import distributed, sharding
from cory.parallel.devices import autocast, to_device
from cory.roles import Prompt
from cory.rollout import Rollout


class Agent:
    """One LLM that answers prompts and learns from rewards.

    Args:
        name: `agent_1`, ...; names the agent's folder and its metrics.
        policy: the causal language model, including the adapters of all agents that share it.
        tokenizer: the policy's tokenizer.
        config: the run's settings.
        device: where the agent samples and learns.
        learner: trains the policy. None: the agent is frozen; it is its own reference, so its KL is 0.
        engine: external sampler used in place of the policy (`sampling.engine`).
        adapter: name of the agent's LoRA adapter. None: the agent answers with all adapters off.

    Attributes:
        date: the date shown by chat templates that print one. The trainer sets it to the day on which the run first
            started.
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
        adapter: str | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self.tokenizer = tokenizer
        self.config = config
        self.device = device
        self.learner = learner
        self.pass_size = PassSize(policy, config, device) if learner is None else learner.pass_size
        self.engine = engine
        self.adapter = adapter
        self.chat_template = config.model.chat_template
        self.date = date.today().isoformat()
        self.context_length = context_length(policy)  # in tokens; None if unknown
        if engine is not None:
            self.context_length = min(
                self.context_length or engine.context_length, engine.context_length
            )

    @property
    def is_trained(self) -> bool:
        """Whether the agent learns; otherwise it is frozen."""
        return self.learner is not None

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Returns prompts as token ids."""
        return encode(self.tokenizer, prompts, self.chat_template, self.date)

    def encode_responses(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[list[int]]:
        """Returns responses to prompts as token ids, without an end token."""
        return encode_responses(self.tokenizer, prompts, texts, self.chat_template)

    def encode_checked(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        """Returns prompts as token ids, like `encode`.

        Raises a UserError if a prompt and a response of `max_new_tokens` tokens exceed the model's context length.
        """
        prompt_ids = self.encode(prompts)
        lengths = [len(ids) for ids in prompt_ids]
        check_lengths(lengths, max_new_tokens, self.context_length, prompts)
        return prompt_ids

    def activate(self) -> None:
        """Activates the agent's adapter, if it has one. Agents may share one model, with an adapter each."""
        if self.adapter is not None:
            activate(self.policy, self.adapter)

    def check_model(self) -> None:
        """Raises a UserError if padding changes the policy's outputs."""
        with self._answering():
            check_model(self.policy, self.tokenizer, samples=self.engine is None)

    def respond(
        self,
        prompts: list[Prompt],
        sampling: SamplingConfig,
        generator: torch.Generator,
        keep_logits: bool = False,
    ) -> Rollout:
        """Samples a response of at most `sampling.max_new_tokens` tokens per prompt.

        Args:
            prompts: text or chat messages.
            sampling: how tokens are drawn and where a response ends.
            generator: draws the tokens; unused by an engine, which has random numbers of its own.
            keep_logits: whether to keep the logits in the rollout; an engine returns none.

        Raises a UserError if a prompt is too long.
        """
        encoded = self.encode_checked(prompts, sampling.max_new_tokens)
        prompt_ids = [torch.tensor(ids, dtype=torch.long) for ids in encoded]
        turn = are_turns(prompts, self.chat_template)
        if turn:
            ends_turn = turn_stop(self.policy, self.tokenizer, self.chat_template, sampling.stop)
            sampling = replace(sampling, stop=[*sampling.stop, *ends_turn])
        ends = end_tokens(self.policy, self.tokenizer)
        logits: list[list[torch.Tensor]] = []
        logprobs: list[torch.Tensor] = []  # only an engine returns them
        if self.engine is None:
            with self._answering():
                response_ids, logits = sample(
                    self.policy, self.tokenizer, prompt_ids, sampling, generator, ends, keep_logits
                )
        else:
            self.activate()
            response_ids, logprobs = self.engine.sample(
                self.name, self.policy, prompt_ids, sampling, ends
            )
        read = reader(self.tokenizer)
        return Rollout(
            prompts,
            plain_texts(self.tokenizer, response_ids, sampling.stop, turn),
            prompt_ids,
            response_ids,
            logprobs,
            logits,
            agent=self.name,
            finished=[
                ends_response(read, ends, sampling.stop, ids.tolist()) for ids in response_ids
            ],
        )

    @torch.no_grad()
    def log_likelihoods(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> torch.Tensor:
        """Returns each text's log-likelihood as the response to its prompt, in nats: (rows,) float32 on the CPU.

        Probabilities are computed at the sampling temperature, and the end token is not counted.

        Raises a UserError if a prompt and its text exceed the context length.
        """
        prompt_ids = [torch.tensor(ids, dtype=torch.long) for ids in self.encode(prompts)]
        text_ids = [
            torch.tensor(ids, dtype=torch.long) for ids in self.encode_responses(prompts, texts)
        ]
        lengths = [
            len(prompt) + len(text) for prompt, text in zip(prompt_ids, text_ids, strict=True)
        ]
        check_lengths(lengths, 0, self.context_length, prompts)
        with self._answering():
            return self.pass_size.retrying(self._log_likelihoods, prompt_ids, text_ids)

    def _log_likelihoods(
        self, prompt_ids: Sequence[torch.Tensor], text_ids: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Computes `log_likelihoods`, (rows,), from token ids, one micro-batch at a time."""
        pad_id = pad_token(self.tokenizer)
        likelihoods = []
        for start in range(0, len(prompt_ids), self.pass_size.micro_batch):
            rows = slice(start, start + self.pass_size.micro_batch)
            logits = response_logits(self.policy, prompt_ids[rows], text_ids[rows], pad_id)
            logprobs = (logits.float() / self.config.sampling.temperature).log_softmax(-1)
            ids, mask = (
                to_device(part, self.device) for part in pad(text_ids[rows], pad_id, "right")
            )
            token_logprobs = logprobs.gather(-1, ids[..., None]).squeeze(-1)
            likelihoods.append((token_logprobs * mask).sum(1).cpu())
        return torch.cat(likelihoods)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Prepares the policy for answering: no dropout, and no adapter except the agent's own."""
        self.policy.eval()
        self.activate()
        with (
            autocast(self.device, self.config.precision),
            without_adapters(self.policy) if self.adapter is None else nullcontext(),
            sharding.gathered(self.policy),
        ):
            yield

    def learn(
        self,
        rollouts: Sequence[Rollout],
        rewards: Sequence[torch.Tensor],
        shuffle: np.random.Generator,
        warmth: float = 1.0,
    ) -> list[UpdateStats]:
        """Updates the policy on the agent's rollouts and returns statistics for each of them.

        Args:
            rollouts: one rollout (prompts and responses) per role that the agent holds.
            rewards: training rewards (batch,), one tensor per rollout.
            shuffle: draws the order of the rows in each epoch.
            warmth: factor on the learning rate, at most 1 (warmup).

        A frozen agent learns nothing; its statistics contain only KL and length.

        Raises NotFinite, which names agent and role, if a loss or gradient is not finite.
        """
        if self.learner is None:
            return [
                UpdateStats(kl=0.0, response_tokens=_mean_length(rollout, self.device))
                for rollout in rollouts
            ]
        self.activate()
        self._mark_engine_outdated()
        return self.learner.update(rollouts, rewards, shuffle, warmth)

    def response_kls(self, rollout: Rollout) -> list[float]:
        """Returns each response's KL to the reference, in nats."""
        if self.learner is None:
            return [0.0] * len(rollout.response_ids)
        self.activate()
        return self.learner.response_kls(rollout)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Returns the state to checkpoint: a dict of tensors (weights, optimizer state) and one of JSON values.

        A frozen agent's dicts are empty.
        """
        return ({}, {}) if self.learner is None else self.learner.save_state()

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Restores what `state` returned. Raises a ValueError if a tensor has the wrong shape or is missing."""
        if self.learner is not None:
            self._mark_engine_outdated()
            self.learner.load_state(tensors, numbers)

    def _mark_engine_outdated(self) -> None:
        if self.engine is not None:
            self.engine.mark_outdated(self.name)

    def restart(self) -> None:
        """Resets optimizer state, KL coefficient and running reward statistics (`cory.reset_every`)."""
        if self.learner is not None:
            self.learner.restart()

    def save(self, folder: Path) -> None:
        """Writes the policy and its tokenizer as a Hugging Face or PEFT folder, without the value head."""
        self.activate()
        save_policy(self.policy, folder, self.adapter)
        if distributed.is_main():
            self.tokenizer.save_pretrained(folder)


def _mean_length(rollout: Rollout, device: torch.device) -> float:
    """Returns the mean response length in tokens, over all processes."""
    tokens = sum(len(ids) for ids in rollout.response_ids)
    sums = distributed.all_reduce_sum(
        torch.tensor([tokens, len(rollout.response_ids)], device=device)
    )
    return (sums[0] / sums[1]).item()
