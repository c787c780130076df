"""Builds a run's agents: loads their models, shares weights between agents where possible, and makes the learners.

In this file, *base* is the loaded model that agents start from: the original that full fine-tuning copies, or the model
to which LoRA adds adapters. The reference is the untrained model to which the KL is measured.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from cory.agent import Agent
from cory.config import AlgorithmName, Config, ModelConfig, SamplingConfig
from cory.errors import UserError
from cory.learners.group import GroupLearner
from cory.learners.learner import Learner
from cory.models.load import load_policy
from cory.models.lora import LanguageModel, activate, add_adapter
from cory.models.vllm import Engine
from cory.models.window import WindowPolicy
from cory.parallel import distributed, sharding
from cory.parallel.devices import choose_device, configure
from cory.process import caveats, warn
from cory.streams import Purpose, Stream

if TYPE_CHECKING:
    from cory.learners.ppo import PolicyWithValueHead, PPOLearner

TRL = "0.11.4"  # for PPO: the last release whose PPOTrainer has step()


@dataclass
class AgentPlan:
    """The parts from which an agent is built.

    Args:
        index: the agent's index, from 0.
        config: the agent's settings, with the model's name resolved to a folder or a Hub id.
        device: where the agent samples and learns.
        learner_type: class of the agent's learner; None for a frozen agent.
    """

    index: int
    config: Config
    device: torch.device
    learner_type: "type[PPOLearner | GroupLearner] | None"

    @property
    def trained(self) -> bool:
        """Whether the agent learns."""
        return self.learner_type is not None

    @property
    def name(self) -> str:
        """The agent's name: `agent_1`, ..."""
        return f"agent_{self.index + 1}"

    @property
    def uses_lora(self) -> bool:
        """Whether the agent is a LoRA adapter."""
        return self.config.lora.rank > 0

    def shares_base(self, other: "AgentPlan") -> bool:
        """Whether two agents can share one base."""
        if self.config.model != other.config.model:
            return False
        # A base with adapters cannot be the reference of a fully fine-tuned agent.
        return not (self.trained and other.trained and self.uses_lora != other.uses_lora)


def make_agents(config: Config) -> list[Agent]:
    """Makes a run's agents, `agent_1`, `agent_2`, ...: copies of one model, except for the changes in `config.agents`.

    With full fine-tuning, each agent has its own weights, and agents with the same model share one frozen reference.
    With LoRA, all agents are adapters on one base, and the reference is the base with its adapters off. A frozen agent
    (`agents: [{trained: false}]`) uses the base itself, shared with agents that have the same model. Agents with their
    own devices (`agents: [{device: ...}]`) share nothing. Each PPO agent has a value head.

    Raises a UserError if a setting is out of range, a device or a model is not available, padding changes a model's
    outputs, or an agent that should learn has no trainable weights.
    """
    config.check()
    caveats.clear()  # warnings from an earlier run in this process
    _warn_if_off_policy(config.sampling)
    plans = [_plan(config, index) for index in range(config.cory.num_agents)]

    # Processes communicate on the first agent's device.
    distributed.start(plans[0].device)
    distributed.check(config)
    for device in {plan.device for plan in plans}:
        configure(device, sharded=config.parallel.shard == "full")

    engine = Engine(config) if config.sampling.engine == "vllm" else None
    agents: dict[str, Agent] = {}
    for group in _groups_by_base(config, plans):
        agents_of_base = _make_agents_of_base(group, engine)
        agents_of_base[0].check_model()
        agents |= {agent.name: agent for agent in agents_of_base}
    return [agents[plan.name] for plan in plans]


def _plan(config: Config, index: int) -> AgentPlan:
    """Plans one agent. Raises a UserError if its device, or TRL for a PPO learner, is not available."""
    settings = copy.copy(config.of_agent(index))
    settings.model = replace(settings.model, name=settings.resolve(settings.model.name))
    learner_type = _learner_type(config.algorithm) if config.is_trained(index) else None
    return AgentPlan(index, settings, choose_device(settings.device), learner_type)


def _learner_type(algorithm: AlgorithmName) -> "type[PPOLearner | GroupLearner]":
    """Returns an algorithm's learner class. Only PPO imports TRL."""
    if algorithm != "ppo":
        return GroupLearner
    try:
        installed = version("trl")
    except PackageNotFoundError:
        installed = "none"
    if installed != TRL:
        raise UserError(
            f"algorithm: expected trl=={TRL} for ppo (pip install -c constraints.txt -e '.[ppo]'), got {installed}"
        )
    from cory.learners.ppo import PPOLearner

    return PPOLearner


def _groups_by_base(config: Config, plans: Sequence[AgentPlan]) -> list[list[AgentPlan]]:
    """Groups the agents that share one base."""
    if config.device_per_agent:  # these agents learn at the same time, so they share nothing
        return [[plan] for plan in plans]
    groups: list[list[AgentPlan]] = []
    for plan in plans:
        group = next((group for group in groups if all(map(plan.shares_base, group))), None)
        if group is None:
            groups.append([plan])
        else:
            group.append(plan)
    return groups


def _make_agents_of_base(plans: Sequence[AgentPlan], engine: Engine | None) -> list[Agent]:
    """Makes the agents that share one base, all on one device.

    With full fine-tuning, their base becomes the reference; with LoRA, it holds their adapters.
    """
    config = plans[0].config
    device = plans[0].device
    base, tokenizer = load_policy(config.model, device)
    if config.model.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})

    trained = [plan for plan in plans if plan.trained]
    policies = _make_policies(plans, base)
    reference = None  # LoRA needs none: the learner switches the adapters off
    if trained and not trained[0].uses_lora:
        _warn_of_half_precision(base, config.model)
        reference = WindowPolicy(base).requires_grad_(False).eval()
        reference = sharding.placed(
            sharding.split(reference, config.parallel, config.precision), device
        )
    elif not trained:
        base.requires_grad_(False).eval()

    agents = []
    for plan in plans:
        wrapped = sharding.placed(policies[plan.name], device)
        policy = wrapped.pretrained_model
        learner: Learner | None = None
        if plan.learner_type is not None:
            activate(policy, plan.name)
            if getattr(policy, "is_quantized", False) and not plan.uses_lora:
                raise UserError(
                    f"lora.rank: expected above 0 for {plan.name}, got 0. The weights of "
                    f"{plan.config.model.name!r} are quantized, so only adapters can be trained"
                )
            if not any(weight.requires_grad for weight in policy.parameters()):
                raise UserError(
                    f"model.name: expected a model with trainable weights for {plan.name}, got "
                    f"{plan.config.model.name!r}. All its weights are frozen"
                )
            make_learner: Callable[..., Learner] = plan.learner_type
            learner = make_learner(wrapped, reference, tokenizer, plan.config, device)
        adapter = plan.name if plan.uses_lora else None
        agents.append(
            Agent(plan.name, policy, tokenizer, plan.config, device, learner, engine, adapter)
        )
    return agents


def _warn_if_off_policy(sampling: SamplingConfig) -> None:
    """Warns if top_k, top_p or repetition_penalty change the distribution from which tokens are drawn."""
    defaults = SamplingConfig()
    changed = [
        f"sampling.{key}: {getattr(sampling, key):g}"
        for key in ("top_k", "top_p", "repetition_penalty")
        if getattr(sampling, key) != getattr(defaults, key)
    ]
    if changed:
        warn(
            f"{', '.join(changed)}: samples are off-policy, since log-probabilities and KL refer to the whole "
            "distribution"
        )


def _warn_of_half_precision(base: PreTrainedModel, model: ModelConfig) -> None:
    """Warns if all weights are trained in 16 bits, where small updates are rounded away.

    Near 0.02, for example, neighbouring bfloat16 numbers differ by 0.0001.
    """
    if base.dtype not in (torch.bfloat16, torch.float16):
        return
    dtype = str(base.dtype).removeprefix("torch.")
    warn(
        f"The weights of {model.name!r} are trained in {dtype} (model.dtype: {model.dtype}) and will hardly change: "
        "Adam's steps are small enough to be rounded away. Use --model.dtype float32, with --precision bf16 for speed"
    )


def _make_policies(
    plans: Sequence[AgentPlan], base: LanguageModel
) -> "dict[str, PolicyWithValueHead | WindowPolicy]":
    """Returns the wrapped policies of agents that start from `base`, by agent name."""
    policies: dict[str, PolicyWithValueHead | WindowPolicy] = {}
    adapted = base  # gains an adapter per LoRA agent
    trained = [plan for plan in plans if plan.trained]
    for plan in trained:
        policy = make_policy(plan, adapted)
        if plan.uses_lora:
            adapted = policy.pretrained_model
        else:  # sharded at once, so that only one full copy is in memory at a time
            policy = sharding.split(policy, plan.config.parallel, plan.config.precision)
        policies[plan.name] = policy
    # A frozen agent is the base itself, which is also the trained agents' reference.
    frozen = [plan for plan in plans if not plan.trained]
    for plan in frozen:
        policies[plan.name] = WindowPolicy(adapted)
    # With LoRA, the base is sharded only after all adapters have been added.
    return {
        plan.name: sharding.split(policies[plan.name], plan.config.parallel, plan.config.precision)
        for plan in plans
    }


def make_policy(plan: AgentPlan, base: LanguageModel) -> "PolicyWithValueHead | WindowPolicy":
    """Returns an agent's wrapped policy: a copy of the base, or, with LoRA, the base with a new adapter."""
    config = plan.config
    assert plan.learner_type is not None
    wrap = plan.learner_type.wrapper
    # PEFT and TRL initialize adapters and value heads with torch's global generator.
    with Stream(config.seed, Purpose.INITIALIZATION, agent=plan.index).as_global():
        if config.lora.rank:
            adapted = add_adapter(base, plan.name, config.lora)
            adapter = adapted.peft_config[plan.name]
            adapter.base_model_name_or_path = config.model.name
            adapter.revision = config.model.revision
            policy = wrap(adapted)
        else:
            policy = wrap(copy.deepcopy(base))
    if config.algorithm == "ppo" and config.ppo.value_head_init == "zeros":
        for name, parameter in policy.named_parameters():
            if name.startswith("v_head."):
                torch.nn.init.zeros_(parameter)
    return policy
