"""An agent: one LLM with its learner. It keeps its weights and optimizer for the whole run, whatever its role."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.config import Config, ModelConfig
from cory.errors import one_of
from cory.learners import losses
from cory.learners.frozen import Frozen
from cory.learners.group import GroupLearner, WindowPolicy
from cory.learners.learner import Learner
from cory.learners.optimizer import check_optimizer
from cory.learners.ppo import PPOLearner
from cory.learners.stats import UpdateStats
from cory.learners.trl_parts import PolicyWithValueHead
from cory.models.engine import Engine
from cory.models.load import load_policy
from cory.models.lora import (
    LanguageModel,
    activate,
    add_adapter,
    save_policy,
    save_without_adapters,
)
from cory.models.rollout import Rollout
from cory.models.sampling import are_turns, check_lengths, context_length, encode, plain_texts
from cory.models.static import check_static
from cory.models.tokens import token_record
from cory.parallel import distributed
from cory.parallel.devices import choose_device, configure
from cory.parallel.sharding import split
from cory.prompts import Prompt
from cory.streams import Purpose, Stream


class Agent:
    """One LLM that answers prompts and learns from rewards.

    Args:
        name: `agent_1`, ...; names its folder and its metrics.
        policy: the policy, wrapped as `config.algorithm` requires; see `wrapper`.
        reference: pi_0, frozen; may be shared between agents. None: the policy with its adapters
            off.
        tokenizer: the policy's.
        config: the run's settings.
        device: where the agent samples and learns.
        engine: samples in place of the policy.
        trained: False: it answers and does not learn. Its policy has no value head then, and is its own reference.
    """

    def __init__(
        self,
        name: str,
        policy: PolicyWithValueHead | WindowPolicy,
        reference: torch.nn.Module | None,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        device: torch.device,
        engine: Engine | None = None,
        trained: bool = True,
    ) -> None:
        self.name = name
        self.is_trained = trained
        self.tokenizer = tokenizer
        self.sampling = config.sampling
        self.chat_template = config.model.chat_template
        self.merge = config.lora.merge
        self.device = device
        self.learner: Learner | Frozen
        if trained:
            self.learner = make_learner(policy, reference, tokenizer, config, device)
        else:
            self.learner = Frozen(policy, tokenizer, config, device)
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
                self.name, self.policy, prompt_ids, max_new_tokens, sampling.stop
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
    policy: PolicyWithValueHead | WindowPolicy,
    reference: torch.nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    device: torch.device,
) -> Learner:
    """Builds the learner for `config.algorithm`. `policy`: in its `wrapper`."""
    learner = ALGORITHMS[config.algorithm].learner
    return learner(policy, reference, tokenizer, config, device)


@dataclass
class AgentPlan:
    """What one agent is made of.

    Args:
        index: from 0.
        config: its settings, its model's name resolved to a folder or a Hub id.
        device: where it samples and learns.
        alone: whether it shares nothing with others, as it learns at the same time as they do.
        trained: whether it learns.
    """

    index: int
    config: Config
    device: torch.device
    alone: bool
    trained: bool = True

    @property
    def name(self) -> str:
        """`agent_1`, ..."""
        return f"agent_{self.index + 1}"

    @property
    def uses_lora(self) -> bool:
        """Whether the agent is an adapter on a base."""
        return self.config.lora.rank > 0

    def shares_base(self, other: "AgentPlan") -> bool:
        """Whether both start from one loaded model: they copy it and share it as reference, or adapt it."""
        if self.alone:
            return False
        if self.config.model != other.config.model:
            return False
        if self.trained and other.trained and self.uses_lora != other.uses_lora:
            return False  # a base with adapters cannot be the reference of an agent without
        # Adapters share a base unless their settings give each one of its own.
        return all(plan.config.lora.shared_base for plan in (self, other) if plan.uses_lora)


def make_agents(config: Config) -> list[Agent]:
    """The agents of a run, `agent_1`, `agent_2`, ...: equal copies of the policy unless
    `config.agents` says otherwise.

    Full fine-tuning: each agent has a copy of the weights; agents of the same model share one
    frozen reference. LoRA: each agent has an adapter, on one base or on copies of it
    (`lora.shared_base`); the reference is the base with its adapters off. Agents with devices of
    their own (`agents: [{device: ...}]`) share nothing. Each PPO agent has a value head. A frozen
    agent (`agents: [{trained: false}]`) is a base that others share, or one of its own.

    Raises a UserError if a setting is out of range, a device or a model is not available, or a
    model is one that padded batches change.
    """
    config.check()
    check_optimizer(config.ppo.optimizer)
    plans = plan_agents(config)

    # The process's own device, where it is about messages between processes, is the first agent's.
    distributed.start(plans[0].device, config.parallel.offload)
    distributed.check(config)
    for device in {plan.device for plan in plans}:
        configure(device, sharded=config.parallel.shard == "full")

    engine = Engine(config) if config.sampling.engine == "vllm" else None
    agents: dict[int, Agent] = {}
    for group in groups_by_base(plans):
        agents_of_base = make_agents_of_base(group, config, engine)
        distributed.fail_together(agents_of_base[0].check_model)
        agents |= zip([plan.index for plan in group], agents_of_base, strict=True)
    return [agents[plan.index] for plan in plans]


def plan_agents(config: Config) -> list[AgentPlan]:
    """What each agent is made of. Raises a UserError if its device is not available."""
    plans = []
    for index in range(config.cory.num_agents):
        settings = copy.copy(config.of_agent(index))
        settings.model = replace(settings.model, name=settings.resolve(settings.model.name))
        plan = AgentPlan(
            index,
            settings,
            choose_device(settings.device),
            alone=config.device_per_agent,
            trained=config.is_trained(index),
        )
        plans.append(plan)
    return plans


def groups_by_base(plans: Sequence[AgentPlan]) -> list[list[AgentPlan]]:
    """The agents in groups that each start from one loaded model."""
    groups: list[list[AgentPlan]] = []
    for plan in plans:
        group = next((group for group in groups if all(map(plan.shares_base, group))), None)
        if group is None:
            groups.append([plan])
        else:
            group.append(plan)
    return groups


def make_agents_of_base(
    plans: Sequence[AgentPlan], config: Config, engine: Engine | None
) -> list[Agent]:
    """The agents of a group, and what they share: the reference or the base."""
    model = plans[0].config.model
    base, tokenizer = load_policy(model, plans[0].device)
    if model.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})

    trained = [plan for plan in plans if plan.trained]
    policies = _make_policies(plans, base)
    reference = None  # with LoRA, the policy with its adapters off
    if trained and not trained[0].uses_lora:
        _warn_of_half_precision(base, model)
        reference = _make_reference(base, config)
    elif not trained:
        base.requires_grad_(False).eval()

    agents = []
    for plan in plans:
        policy = policies[plan.name]
        if plan.trained:
            activate(policy.pretrained_model, plan.name)
        agents.append(
            Agent(
                name=plan.name,
                policy=policy,
                reference=reference,
                tokenizer=tokenizer,
                config=plan.config,
                device=plan.device,
                engine=engine,
                trained=plan.trained,
            )
        )
    return agents


def _warn_of_half_precision(base: PreTrainedModel, model: ModelConfig) -> None:
    """Warns if all weights are to be trained in 16 bits. Numbers near 0.02 are then 0.0001 (bfloat16) apart."""
    if base.dtype not in (torch.bfloat16, torch.float16):
        return
    dtype = str(base.dtype).removeprefix("torch.")
    warnings.warn(
        f"The weights of {model.name!r} are trained in {dtype} (model.dtype: {model.dtype}), which rounds steps as "
        "small as Adam's away: they hardly change. Use --model.dtype float32, with --precision bf16 for speed",
        stacklevel=3,
    )


def _make_policies(
    plans: Sequence[AgentPlan], base: LanguageModel
) -> dict[str, PolicyWithValueHead | WindowPolicy]:
    """The policies of agents that start from `base`, in their wrappers, by the agents' names."""
    policies: dict[str, PolicyWithValueHead | WindowPolicy] = {}
    adapted = base  # with the adapters so far
    trained = [plan for plan in plans if plan.trained]
    for plan in trained:
        policy = make_policy(plan, adapted)
        if plan.uses_lora:
            adapted = policy.pretrained_model
        else:  # sharded at once, so that one whole copy is in memory at a time
            policy = split(policy, plan.config.parallel, plan.config.precision)
        policies[plan.name] = policy
    # A frozen agent is the unmodified base, which the others use as reference.
    frozen = [plan for plan in plans if not plan.trained]
    for plan in frozen:
        policies[plan.name] = WindowPolicy(adapted)
    # A base with adapters is sharded when it has those of all agents.
    return {
        plan.name: split(policies[plan.name], plan.config.parallel, plan.config.precision)
        for plan in plans
    }


def _make_reference(base: LanguageModel, config: Config) -> PolicyWithValueHead | WindowPolicy:
    """The frozen reference that the agents of a base share, in the wrapper of their policies."""
    reference = wrapper(config.algorithm)(base).requires_grad_(False).eval()
    return split(reference, config.parallel, config.precision)


def make_policy(plan: AgentPlan, base: LanguageModel) -> PolicyWithValueHead | WindowPolicy:
    """An agent's policy in its wrapper: a copy of the base, or with LoRA the base with a new adapter."""
    config = plan.config
    wrap = wrapper(config.algorithm)
    # PEFT and TRL draw adapters and value heads from torch's global generator.
    with Stream(config.seed, Purpose.INITIALIZATION, agent=plan.index).as_global():
        if config.lora.rank:
            adapted = add_adapter(base, plan.name, config.lora)
            adapter = adapted.peft_config[plan.name]
            adapter.base_model_name_or_path = config.model.name
            adapter.revision = config.model.revision
            policy = wrap(adapted)
        else:
            policy = wrap(copy.deepcopy(base))
    if isinstance(policy, PolicyWithValueHead) and config.ppo.value_head_init == "zeros":
        for parameter in policy.v_head.parameters():
            torch.nn.init.zeros_(parameter)
    return policy
