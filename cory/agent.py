"""An agent: one LLM with its PPOTrainer. It keeps its weights and optimizer for the whole run, in whatever role."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from cory.adapters import save_policy
from cory.config import Config
from cory.ppo import PPOTrainer
from cory.sampling import check_lengths, context_length, encode, plain_text
from cory.trl_parts import PolicyWithValueHead, RunningMoments, trl_config

# What an agent reports of an update, under the names of docs/metrics.md, and TRL's name for it.
STATS = {
    "kl": "objective/kl",
    "kl_coef": "objective/kl_coef",
    "entropy": "ppo/policy/entropy",
    "policy_loss": "ppo/loss/policy",
    "value_loss": "ppo/loss/value",
    "clip_fraction": "ppo/policy/clipfrac",
    "gradient_norm": "gradient_norm",
    "skipped_steps": "skipped_steps",
    "dropped_steps": "dropped_steps",
    "response_tokens": "tokens/responses_len_mean",
}


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
        reference: pi_0, frozen; may be shared between agents. None: the policy with its adapters off.
        tokenizer: of the policy.
        config: the run's settings.
    """

    def __init__(
        self,
        name: str,
        policy: PolicyWithValueHead,
        reference: PolicyWithValueHead | None,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.sampling = config.sampling
        self.chat_template = config.model.chat_template
        self.merge = config.lora.merge
        settings = trl_config(config.ppo, config.seed)
        self.ppo = PPOTrainer(
            settings,
            policy,
            reference,
            tokenizer,
            micro_batch=config.ppo.micro_batch,
            precision=config.precision,
            on_nonfinite=config.guards.on_nonfinite,
        )

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts, as the policy reads them."""
        return encode(self.tokenizer, prompts, self.chat_template)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes this agent's adapter the one that answers and learns, where agents share a base."""
        if isinstance(self.ppo.policy, PeftModel):
            self.ppo.policy.set_adapter(self.name)
        yield

    def respond(self, prompts: list[str], max_new_tokens: int) -> Rollout:
        """Samples one response of at most `max_new_tokens` tokens per prompt.

        Raises:
            UserError: a prompt has no tokens, or with its response is longer than the policy's context.
        """
        queries = [torch.tensor(ids, dtype=torch.long) for ids in self.encode(prompts)]
        policy = self.ppo.policy
        check_lengths([len(query) for query in queries], max_new_tokens, context_length(policy), prompts)
        with self.active():
            responses = self.ppo.generate(queries, self.sampling, max_new_tokens)
        completions = [plain_text(self.tokenizer, response, self.sampling.stop) for response in responses]
        return Rollout(prompts, completions, queries, responses)

    def learn(self, rollout: Rollout, rewards: torch.Tensor) -> dict[str, float]:
        """One PPO update on a rollout.

        Args:
            rewards: (batch,), the training reward of each response.

        Returns:
            the statistics of the update: see `STATS` and docs/metrics.md.
        """
        with self.active():
            stats = self.ppo.step(rollout.queries, rollout.responses, rewards)
        return {name: float(stats[key]) for name, key in STATS.items()}

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All that training has changed, for a checkpoint: weights and Adam's moments, and numbers as json."""
        ppo, tensors = self.ppo, {}
        for name, parameter in self._trained().items():
            tensors[f"weights/{name}"] = parameter.detach()
            for key, value in ppo.optimizer.state.get(parameter, {}).items():
                tensors[f"adam/{name}/{key}"] = value
        moments = {key: float(getattr(ppo.running, key)) for key in ("mean", "std", "var", "count")}
        numbers = {"kl_coef": ppo.kl_ctl.value, "moments": moments, "micro_batch": ppo.micro_batch}
        return {name: tensor.contiguous() for name, tensor in tensors.items()}, numbers

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Takes up what `state` gave.

        Raises:
            ValueError: a tensor is missing, left over, or of another shape or type than the weights here.
        """
        ppo, trained = self.ppo, self._trained()
        unknown = [name for name in tensors if name.split("/")[1] not in trained]
        if unknown:
            raise ValueError(f"unknown tensor {unknown[0]}")
        adam: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for name, parameter in trained.items():
            saved = tensors.get(f"weights/{name}")
            if saved is None or saved.shape != parameter.shape or saved.dtype != parameter.dtype:
                came = None if saved is None else (tuple(saved.shape), saved.dtype)
                raise ValueError(f"expected {(tuple(parameter.shape), parameter.dtype)} for {name}, got {came}")
            prefix = f"adam/{name}/"
            keys = [key.removeprefix(prefix) for key in tensors if key.startswith(prefix)]
            adam[parameter] = {key: tensors[prefix + key].to(parameter.device) for key in keys}
        ppo.optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(tensors[f"weights/{name}"])
                if adam[parameter]:
                    ppo.optimizer.state[parameter] = adam[parameter]
        ppo.kl_ctl.value = float(numbers["kl_coef"])
        ppo.micro_batch = int(numbers["micro_batch"])
        ppo.running = RunningMoments(ppo.accelerator)
        if numbers["moments"]["count"] >= 1:  # else no reward has been seen
            for key, value in numbers["moments"].items():
                setattr(ppo.running, key, torch.tensor(value) if key in ("mean", "std") else value)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name, in the optimizer's order."""
        ppo = self.ppo
        names = {parameter: name for name, parameter in ppo.accelerator.unwrap_model(ppo.model).named_parameters()}
        return {names[parameter]: parameter for parameter in ppo.model_params}

    def restart(self) -> None:
        """Forgets optimizer state, KL coefficient and reward moments (only for `reset_on_exchange`)."""
        self.ppo.restart()

    def save(self, folder: Path) -> None:
        """Writes the policy and its tokenizer as a Hugging Face or PEFT folder; the value head stays out."""
        with self.active():
            save_policy(self.ppo.policy, folder, self.name, self.merge)
        self.tokenizer.save_pretrained(folder)
