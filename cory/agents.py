"""The agents of a run, made from its settings: which models are loaded, and who shares one."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from cory.agent import Agent
from cory.config import Config, ModelConfig
from cory.learners.algorithms import make_learner, wrapper
from cory.learners.group import WindowPolicy
from cory.learners.optimizer import check_optimizer
from cory.learners.trl_parts import PolicyWithValueHead
from cory.models.engine import Engine
from cory.models.load import load_policy
from cory.models.lora import LanguageModel, activate, add_adapter
from cory.parallel import distributed
from cory.parallel.devices import choose_device, configure
from cory.parallel.sharding import placed, split
from cory.streams import Purpose, Stream


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
        # A base with adapters cannot be the reference of an agent without.
        return not (self.trained and other.trained and self.uses_lora != other.uses_lora)


def make_agents(config: Config) -> list[Agent]:
    """The agents of a run, `agent_1`, `agent_2`, ...: equal copies of the policy unless
    `config.agents` says otherwise.

    Full fine-tuning: each agent has a copy of the weights; agents of the same model share one
    frozen reference. LoRA: each agent has an adapter, all on one base; the reference is the base
    with its adapters off. Agents with devices of their own (`agents: [{device: ...}]`) share
    nothing. Each PPO agent has a value head. A frozen
    agent (`agents: [{trained: false}]`) is a base that others share, or one of its own.

    Raises a UserError if a setting is out of range, a device or a model is not available, or a
    model is one that padded batches change.
    """
    config.check()
    check_optimizer(config.ppo.optimizer)
    plans = plan_agents(config)

    # The process's own device, where it is about messages between processes, is the first agent's.
    distributed.start(plans[0].device)
    distributed.check(config)
    for device in {plan.device for plan in plans}:
        configure(device, sharded=config.parallel.shard == "full")

    engine = Engine(config) if config.sampling.engine == "vllm" else None
    agents: dict[int, Agent] = {}
    for group in groups_by_base(plans):
        agents_of_base = make_agents_of_base(group, config, engine)
        agents_of_base[0].check_model()
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
        wrapped = placed(policies[plan.name], plan.device)
        policy = wrapped.pretrained_model
        learner = None
        if plan.trained:
            activate(policy, plan.name)
            learner = make_learner(wrapped, reference, tokenizer, plan.config, plan.device)
        agent = Agent(plan.name, policy, tokenizer, plan.config, plan.device, learner, engine)
        agents.append(agent)
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
