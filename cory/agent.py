"""An agent: one LLM with its PPOTrainer. It keeps its weights and optimizer for the whole run, whatever role it holds."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from cory.config import Config, SamplingConfig, UserError
from cory.ppo import PolicyWithValueHead, PPOTrainer, trl_config

# What an agent reports of an update, under the names of docs/metrics.md, and TRL's name for it.
STATS = {
    "kl": "objective/kl",
    "kl_coef": "objective/kl_coef",
    "entropy": "ppo/policy/entropy",
    "policy_loss": "ppo/loss/policy",
    "value_loss": "ppo/loss/value",
    "clip_fraction": "ppo/policy/clipfrac",
    "response_tokens": "tokens/responses_len_mean",
}


def seed_everything(*key: int) -> None:
    """Seeds Python, NumPy and torch from `key`, e.g. (seed, iteration, process): nothing else carries randomness over."""
    state = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(state)
    np.random.seed(state)
    torch.manual_seed(state)


def plain_text(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> str:
    """The text of a response without special tokens, also where ordinary tokens spell one out.

    The text goes into another agent's prompt and to the reward function, where a special token would act as one.
    """
    text = before = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    while True:
        for token in tokenizer.all_special_tokens:
            text = text.replace(token, "")
        if text == before:
            return text
        before = text


@dataclass
class Rollout:
    """A batch of responses of one agent: lists of equal length, token ids as 1-d tensors on the policy's device."""

    prompts: list[str]
    completions: list[str]
    queries: list[torch.Tensor]
    responses: list[torch.Tensor]


class Agent:
    """One LLM that answers prompts and learns from rewards.

    Args:
        name: `agent_1`, ...; names its folder and its metrics.
        policy: the policy with its value head.
        reference: pi_0, frozen; may be shared between agents.
        tokenizer: of the policy.
        config: the run's settings.
    """

    def __init__(
        self,
        name: str,
        policy: PolicyWithValueHead,
        reference: PolicyWithValueHead,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.sampling = config.sampling
        self.ppo = PPOTrainer(trl_config(config.ppo, config.seed), policy, reference, tokenizer)

    @property
    def context_length(self) -> int | None:
        """Tokens that the policy can attend to, where its configuration says."""
        return getattr(self.ppo.policy.config, "max_position_embeddings", None)

    def respond(self, prompts: list[str], max_new_tokens: int) -> Rollout:
        """Samples one response of at most `max_new_tokens` tokens per prompt.

        Raises:
            UserError: a prompt has no tokens, or with its response is longer than the policy's context.
        """
        queries = [torch.tensor(ids) for ids in self.tokenizer(prompts)["input_ids"]]
        check_lengths([len(query) for query in queries], max_new_tokens, self.context_length, prompts)
        responses = self.ppo.generate(
            [query.long() for query in queries], generation_config(self.ppo.policy, self.sampling, max_new_tokens, self.ppo.pad_id)
        )
        completions = [plain_text(self.tokenizer, response) for response in responses]
        return Rollout(prompts, completions, queries, responses)

    def learn(self, rollout: Rollout, rewards: torch.Tensor) -> dict[str, float]:
        """One PPO update on a rollout.

        Args:
            rewards: (batch,), the training reward of each response.

        Returns:
            the statistics of the update: see `STATS` and docs/metrics.md.
        """
        stats = self.ppo.step(rollout.queries, rollout.responses, list(rewards))
        return {name: float(stats[key]) for name, key in STATS.items()}

    def restart(self) -> None:
        """Forgets optimizer state, KL coefficient and reward moments (only for `reset_on_exchange`)."""
        self.ppo.restart()

    def save(self, folder: Path) -> None:
        """Writes the policy and its tokenizer as a Hugging Face folder; the value head stays out."""
        self.ppo.policy.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def generation_config(
    policy: torch.nn.Module, sampling: SamplingConfig, max_new_tokens: int, pad_id: int
) -> GenerationConfig:
    """How responses are sampled. States every setting that a model may bring a default of its own for.

    (Llama-2-chat comes with temperature 0.6 and top-p 0.9: its samples would be off-policy.)
    """
    return GenerationConfig(
        do_sample=True,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        min_new_tokens=0,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=0.0,
        typical_p=1.0,
        repetition_penalty=sampling.repetition_penalty,
        no_repeat_ngram_size=0,
        pad_token_id=pad_id,
        eos_token_id=end_tokens(policy),
    )


def end_tokens(policy: torch.nn.Module) -> list[int]:
    """The ids that end a response; empty for a model that has none."""
    ends = policy.generation_config.eos_token_id
    ends = policy.config.eos_token_id if ends is None else ends
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]


def check_lengths(lengths: list[int], max_new_tokens: int, context: int | None, prompts: list[str]) -> None:
    """Raises a UserError that names the first row with no tokens, or too many for the model's context."""
    for row, length in enumerate(lengths):
        if length == 0:
            raise UserError(f"prompt in row {row}: expected at least one token, got {prompts[row]!r}")
        if context is not None and length + max_new_tokens > context:
            raise UserError(
                f"prompt in row {row}: expected at most {context} tokens, the model's context, got {length} of the prompt "
                f"+ {max_new_tokens} of the response = {length + max_new_tokens} ({prompts[row][:80]!r}...)"
            )
