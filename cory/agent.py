"""An agent: one LLM with its learner. It keeps its weights and optimizer for the whole run, in whatever role."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.config import Config, UserError, expect
from cory.learners.ppo import PPOTrainer
from cory.learners.trl_parts import PolicyWithValueHead, trl_config
from cory.policies.load import choose_device, load_policy
from cory.policies.lora import activate, add_adapter, save_policy
from cory.policies.sampling import check_lengths, context_length, encode, plain_text, seed_everything
from cory.run import processes

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
        tokenizer: of the policy. config: the run's settings.
    """

    def __init__(
        self,
        name: str,
        policy: PolicyWithValueHead,
        reference: PolicyWithValueHead | None,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
    ) -> None:
        self.name, self.tokenizer, self.sampling = name, tokenizer, config.sampling
        self.chat_template, self.merge = config.model.chat_template, config.lora.merge
        micro_batch, on_nonfinite = config.ppo.micro_batch, config.guards.on_nonfinite
        settings = trl_config(config.ppo, config.seed)
        self.learner = PPOTrainer(
            settings, policy, reference, tokenizer, micro_batch, config.precision, on_nonfinite=on_nonfinite
        )
        self.device: torch.device = self.learner.accelerator.device
        self.context_length = context_length(self.policy)  # tokens that it can attend to; None where nothing says

    @property
    def policy(self) -> PreTrainedModel:
        """The causal language model, with the adapters of all agents that share it."""
        return self.learner.policy

    @property
    def optimizer_steps(self) -> int:
        """How many optimizer steps it has taken in this process."""
        return self.learner.optimizer_steps

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts, as the policy reads them."""
        return encode(self.tokenizer, prompts, self.chat_template)

    def activate(self) -> None:
        """Makes this agent's adapter the one that answers and learns, where agents share a base."""
        activate(self.policy, self.name)

    def respond(self, prompts: list[str], max_new_tokens: int) -> Rollout:
        """Samples a response of at most `max_new_tokens` tokens per prompt; a UserError where one is too long."""
        queries = [torch.tensor(ids, dtype=torch.long) for ids in self.encode(prompts)]
        check_lengths([len(query) for query in queries], max_new_tokens, self.context_length, prompts)
        self.activate()
        responses = self.learner.generate(queries, self.sampling, max_new_tokens)
        completions = [plain_text(self.tokenizer, response, self.sampling.stop) for response in responses]
        return Rollout(prompts, completions, queries, responses)

    def learn(self, rollout: Rollout, rewards: torch.Tensor) -> dict[str, float]:
        """One update on a rollout; returns its statistics: see `STATS` and docs/metrics.md.

        Args:
            rewards: (batch,), the training reward of each response.

        Raises a NotFinite: a loss or gradient is not finite (`guards.on_nonfinite`).
        """
        self.activate()
        stats = self.learner.step(rollout.queries, rollout.responses, rewards)
        return {name: float(stats[key]) for name, key in STATS.items()}

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All that training has changed, for a checkpoint: weights and Adam's moments, and numbers as json."""
        return self.learner.save_state()

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Takes up what `state` gave. Raises a ValueError where a tensor does not fit."""
        self.learner.load_state(tensors, numbers)

    def restart(self) -> None:
        """Forgets optimizer state, KL coefficient and reward moments (only for `reset_on_exchange`)."""
        self.learner.restart()

    def save(self, folder: Path) -> None:
        """Writes the policy and its tokenizer as a Hugging Face or PEFT folder; the value head stays out."""
        self.activate()
        save_policy(self.policy, folder, self.name, self.merge)
        self.tokenizer.save_pretrained(folder)


def make_agents(config: Config, num_agents: int | None = None) -> list[Agent]:
    """The agents of a run, `agent_1`, `agent_2`, ...: equal copies of the policy, each with a value head of its own.

    Full fine-tuning: a copy of the weights for each, and one frozen reference for all. LoRA: an adapter for each, on
    one base or on copies of it (`lora.shared_base`), and no reference: that is the base with its adapters off.
    `num_agents` is by default that of the settings. Raises a UserError where a setting is out of range, or the device
    or the model cannot be had.
    """
    config.check()
    choose_device(config.device)
    world, size = processes.world_size(), config.ppo.mini_batch_size
    expect(size % world == 0, "ppo.mini_batch_size", f"a multiple of the number of processes, {world}", size)
    kind = PartialState().distributed_type.value
    if kind in ("DEEPSPEED", "FSDP"):
        raise UserError(
            f"accelerate: expected plain data parallelism (configs/accelerate/), got {kind}: two agents in one process "
            "cannot share its engine. LoRA and gradient checkpointing save memory instead."
        )
    num_agents = config.cory.num_agents if num_agents is None else num_agents
    model = replace(config.model, name=config.resolve(config.model.name))
    pi_0, tokenizer = load_policy(model)
    if config.model.gradient_checkpointing:
        pi_0.gradient_checkpointing_enable({"use_reentrant": False})
    policies: list[Any]
    reference = None
    if not config.lora.rank:
        policies = [copy.deepcopy(pi_0) for _ in range(num_agents)]
        reference = PolicyWithValueHead(pi_0).requires_grad_(False).eval()
    elif config.lora.shared_base:
        policies = [pi_0] * num_agents
    else:
        policies = [pi_0] + [load_policy(model)[0] for _ in range(num_agents - 1)]
    agents: list[Agent] = []
    for index, policy in enumerate(policies):
        name = f"agent_{index + 1}"
        seed_everything(config.seed, index)  # draws the value head, and the adapter where there is one
        if config.lora.rank:
            base = agents[0].policy if agents and config.lora.shared_base else policy
            policy = add_adapter(base, name, config.lora)
            policy.peft_config[name].base_model_name_or_path = model.name
        with_value = PolicyWithValueHead(policy)
        if config.ppo.value_head_init == "zeros":
            for parameter in with_value.v_head.parameters():
                torch.nn.init.zeros_(parameter)
        agents.append(Agent(name, with_value, reference, tokenizer, config))
    return agents
