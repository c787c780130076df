"""An agent: one LLM with its learner. It keeps its weights and optimizer for the whole run, whatever its role."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.config import Config
from cory.errors import one_of
from cory.learners import losses
from cory.learners.group import GroupLearner, WindowPolicy
from cory.learners.learner import Learner
from cory.learners.optimizer import check_optimizer
from cory.learners.ppo import PPOLearner
from cory.learners.stats import UpdateStats
from cory.learners.trl_parts import PolicyWithValueHead
from cory.models.apart import Apart, is_here
from cory.models.engine import Engine
from cory.models.load import choose_device, load_policy
from cory.models.lora import activate, add_adapter, save_policy
from cory.models.rollout import Rollout
from cory.models.sampling import are_turns, check_lengths, context_length, encode, plain_text
from cory.models.tokens import token_record
from cory.parallel import distributed
from cory.parallel.sharding import split
from cory.prompts import Prompt
from cory.streams import Purpose, Stream


class Agent:
    """One LLM that answers prompts and learns from rewards.

    Args:
        name: `agent_1`, ...; names its folder and its metrics.
        policy: the policy, wrapped as `config.algorithm` requires; see `wrapper`.
        reference: pi_0, frozen; may be shared between agents. None: the policy with its adapters off.
        tokenizer: the policy's. config: the run's settings. engine: samples in place of the policy.
    """

    def __init__(
        self,
        name: str,
        policy: PolicyWithValueHead | WindowPolicy,
        reference: PolicyWithValueHead | WindowPolicy | None,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        engine: Engine | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.sampling = config.sampling
        self.chat_template = config.model.chat_template
        self.merge = config.lora.merge
        self.learner = make_learner(policy, reference, tokenizer, config)
        self.device: torch.device = self.learner.accelerator.device
        self.engine = engine
        self.context_length = context_length(self.policy)  # in tokens; None if unknown
        if engine is not None:
            self.context_length = min(self.context_length or engine.longest, engine.longest)

    @property
    def policy(self) -> PreTrainedModel:
        """The causal language model, with the adapters of all agents that share it."""
        return self.learner.policy

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps taken in this process."""
        return self.learner.optimizer_steps

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of prompts, as the policy reads them."""
        return encode(self.tokenizer, prompts, self.chat_template)

    def activate(self) -> None:
        """Activates this agent's adapter if agents share a base."""
        activate(self.policy, self.name)

    def check_model(self) -> None:
        """Raises a UserError if the policy gives other log-probabilities in padded batches than for a text alone."""
        self.activate()
        self.learner.check_model(samples=self.engine is None)

    def respond(self, prompts: list[Prompt], max_new_tokens: int, generator: torch.Generator) -> Rollout:
        """Samples a response of at most `max_new_tokens` tokens per prompt.

        Args:
            prompts: text or chat messages.
            generator: draws the tokens, unless an engine does, whose random numbers are its own.

        Raises a UserError if a prompt is too long.
        """
        prompt_ids = [torch.tensor(ids, dtype=torch.long, device=self.device) for ids in self.encode(prompts)]
        check_lengths([len(ids) for ids in prompt_ids], max_new_tokens, self.context_length, prompts)
        self.activate()
        logprobs: list[torch.Tensor] = []
        if self.engine is None:
            response_ids = self.learner.generate(prompt_ids, self.sampling, max_new_tokens, generator)
        else:
            response_ids, logprobs = self.engine.sample(self.name, self.policy, prompt_ids, max_new_tokens)
        turn = are_turns(prompts, self.chat_template)
        completions = [plain_text(self.tokenizer, ids, self.sampling.stop, turn) for ids in response_ids]
        return Rollout(prompts, completions, prompt_ids, response_ids, logprobs, agent=self.name)

    def learn(
        self,
        rollouts: Sequence[Rollout],
        rewards: Sequence[torch.Tensor],
        shuffle: np.random.Generator,
        rate: float = 1.0,
    ) -> list[UpdateStats]:
        """One update on the agent's rollouts, one per role; returns the statistics of each.

        Args:
            rewards: of each rollout, the (batch,) training rewards.
            shuffle: draws the order of the rows in each epoch.
            rate: factor of the learning rate.

        Raises NotFinite, which names agent, role and rows, if a loss or gradient is not finite (`guards.on_nonfinite`).
        """
        self.activate()
        self._changes()
        self.learner.scale_learning_rate(rate)
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
        """The trained state for a checkpoint: weights and Adam's moments as tensors, other numbers as JSON."""
        return self.learner.save_state()

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Restores what `state` returned. Raises a ValueError if a tensor does not fit."""
        self._changes()
        self.learner.load_state(tensors, numbers)

    def _changes(self) -> None:
        if self.engine is not None:
            self.engine.outdated(self.name)

    def restart(self) -> None:
        """Resets optimizer state, KL coefficient and reward moments (only for `reset_on_exchange`)."""
        self.learner.restart()

    def save(self, folder: Path) -> None:
        """Writes the policy and its tokenizer as a Hugging Face or PEFT folder, without the value head."""
        self.activate()
        if save_policy(self.policy, folder, self.name, self.merge):
            self.tokenizer.save_pretrained(folder)


def wrapper(algorithm: str) -> type[PolicyWithValueHead] | type[WindowPolicy]:
    """The wrapper in which `algorithm` trains a language model: with a value head for PPO, without for the others.

    Raises a UserError if there is no such algorithm.
    """
    one_of("algorithm", ("ppo", *losses.ALGORITHMS), algorithm)
    return PolicyWithValueHead if algorithm == "ppo" else WindowPolicy


def make_learner(
    policy: PolicyWithValueHead | WindowPolicy,
    reference: PolicyWithValueHead | WindowPolicy | None,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
) -> Learner:
    """The learner of `config.algorithm`; policy and reference as `wrapper` makes them."""
    learner: Any = PPOLearner if config.algorithm == "ppo" else GroupLearner
    return learner(policy, reference, tokenizer, config)


def make_agents(config: Config, num_agents: int | None = None) -> list[Agent]:
    """The agents of a run, `agent_1`, `agent_2`, ...: equal copies of the policy unless `config.agents` says otherwise.

    Full fine-tuning: each agent has a copy of the weights; agents of the same model share one frozen reference. LoRA:
    each agent has an adapter, on one base or on copies of it (`lora.shared_base`); the reference is the base with its
    adapters off. Each PPO agent has a value head. `num_agents` defaults to that of the settings.

    Raises a UserError if a setting is out of range, the device or a model is not available, or a model is one that
    padded batches change.
    """
    config.check()
    choose_device(config.device, config.parallel)
    check_optimizer(config.ppo.optimizer)
    distributed.check(config)
    engine = Engine(config) if config.sampling.engine == "vllm" else None
    num_agents = config.cory.num_agents if num_agents is None else num_agents
    settings, wrap = [copy.copy(config.of_agent(index)) for index in range(num_agents)], wrapper(config.algorithm)
    bases: dict[str, tuple[Any, PreTrainedTokenizerBase]] = {}  # by `key`
    keys: list[str] = []
    adapted: dict[str, Any] = {}  # bases with adapters
    policies: dict[int, Any] = {}
    for index, own in enumerate(settings):
        own.model = replace(own.model, name=own.resolve(own.model.name))
        # A base with adapters cannot be the reference of an agent without. If not shared, each agent has its own base.
        keys.append(f"{own.model} {bool(own.lora.rank)} {index if own.lora.rank and not own.lora.shared_base else ''}")
        if not is_here(index):
            continue
        if (key := keys[index]) not in bases:
            bases[key] = load_policy(own.model)
            if own.model.gradient_checkpointing:
                bases[key][0].gradient_checkpointing_enable({"use_reentrant": False})
        # PEFT and TRL draw adapters and value heads from torch's global generator.
        with Stream(config.seed, Purpose.INITIALIZATION, agent=index).as_global():
            if own.lora.rank:
                name = f"agent_{index + 1}"
                policy = adapted[key] = add_adapter(adapted.get(key, bases[key][0]), name, own.lora)
                policy.peft_config[name].base_model_name_or_path = own.model.name
                policies[index] = wrap(policy)
            else:
                policies[index] = wrap(copy.deepcopy(bases[key][0]))
        if isinstance(policies[index], PolicyWithValueHead) and config.ppo.value_head_init == "zeros":
            for parameter in policies[index].v_head.parameters():
                torch.nn.init.zeros_(parameter)
        if not own.lora.rank:
            split(policies[index], config.precision)
    frozen = dict.fromkeys(keys[index] for index in policies if not settings[index].lora.rank)
    references = {key: split(wrap(bases[key][0]).requires_grad_(False).eval(), config.precision) for key in frozen}
    agents: list[Any] = []
    for index, (own, key) in enumerate(zip(settings, keys, strict=True)):
        name, agent = f"agent_{index + 1}", None
        if index in policies:
            policy = split(policies[index], config.precision)  # with the adapters of all that share it
            activate(policy.pretrained_model, name)
            agent = Agent(name, policy, references.get(key), bases[key][1], own, engine)
        agents.append(Apart(index, agent, config) if config.parallel.agents == "apart" else agent)
    different = {keys[index]: agents[index] for index in policies}  # one of each base
    distributed.agreed(lambda: [agent.check_model() for agent in different.values()])
    return agents
