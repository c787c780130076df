"""An agent: one LLM with its learner. It keeps its weights and optimizer for the whole run, whatever its role.

`make_agents` makes those of a configuration: which models are loaded, and who shares one.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.config import AlgorithmName, Config, ModelConfig, SamplingConfig
from cory.errors import UserError
from cory.learners.group import GroupLearner, WindowPolicy
from cory.learners.learner import Learner
from cory.learners.memory import PassSize
from cory.learners.records import UpdateStats
from cory.models.families import check_model
from cory.models.load import load_policy
from cory.models.lora import (
    LanguageModel,
    activate,
    add_adapter,
    save_policy,
    without_adapters,
)
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
from cory.parallel.devices import autocast, choose_device, configure, to_device
from cory.roles import Prompt
from cory.rollout import Rollout
from cory.streams import Purpose, Stream

if TYPE_CHECKING:
    from cory.learners.ppo import PolicyWithValueHead, PPOLearner

TRL = "0.11.4"  # for PPO: the last release whose PPOTrainer has step()


class Agent:
    """One LLM that answers prompts and learns from rewards.

    Args:
        name: `agent_1`, ...; names its folder, its metrics and its adapter.
        policy: the causal language model, with the adapters of all agents that share it.
        tokenizer: of the policy.
        config: the run's settings.
        device: where the agent samples and learns.
        learner: trains the policy. None: the agent is frozen. It answers without the adapters of others, and as it is
            its own reference, its KL is 0.
        engine: samples in place of the policy.

    Attributes:
        date: what a chat template writes that writes the date: the trainer sets that of the run's first start.
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
    ) -> None:
        self.name = name
        self.policy = policy
        self.tokenizer = tokenizer
        self.config = config
        self.device = device
        self.learner = learner
        self.pass_size = PassSize(policy, config, device) if learner is None else learner.pass_size
        self.engine = engine
        self.chat_template = config.model.chat_template
        self.date = date.today().isoformat()
        self.context_length = context_length(policy)  # in tokens; None if unknown
        if engine is not None:
            self.context_length = min(
                self.context_length or engine.context_length, engine.context_length
            )

    @property
    def is_trained(self) -> bool:
        """Whether the agent learns; others are frozen."""
        return self.learner is not None

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of prompts, as the policy reads them."""
        return encode(self.tokenizer, prompts, self.chat_template, self.date)

    def encode_responses(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts as responses to prompts, without an end token."""
        return encode_responses(self.tokenizer, prompts, texts, self.chat_template)

    def activate(self) -> None:
        """Activates this agent's adapter if agents share a base. A frozen agent has none."""
        if self.is_trained:
            activate(self.policy, self.name)

    def check_model(self) -> None:
        """Raises a UserError if the policy is wrong in padded batches."""
        with self._answering():
            check_model(self.policy, self.tokenizer, samples=self.engine is None)

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
        sampling = self.config.sampling
        if stop is not None:
            sampling = replace(sampling, stop=stop)
        turn = are_turns(prompts, self.chat_template)
        if turn:
            ends_turn = turn_stop(self.policy, self.tokenizer, self.chat_template, sampling.stop)
            sampling = replace(sampling, stop=[*sampling.stop, *ends_turn])
        prompt_ids = [torch.tensor(ids, dtype=torch.long) for ids in self.encode(prompts)]
        check_lengths(
            [len(ids) for ids in prompt_ids], max_new_tokens, self.context_length, prompts
        )
        logprobs: list[torch.Tensor] = []  # by the engine
        if self.engine is None:
            with self._answering():
                response_ids = sample(
                    self.policy, self.tokenizer, prompt_ids, sampling, max_new_tokens, generator
                ).responses
        else:
            self.activate()
            response_ids, logprobs = self.engine.sample(
                self.name,
                self.policy,
                prompt_ids,
                max_new_tokens,
                end_tokens(self.policy, self.tokenizer),
                sampling.stop,
            )
        completions = plain_texts(self.tokenizer, response_ids, sampling.stop, turn)
        read = reader(self.tokenizer)
        ends = end_tokens(self.policy, self.tokenizer)
        return Rollout(
            prompts,
            completions,
            prompt_ids,
            response_ids,
            logprobs,
            agent=self.name,
            finished=[
                ends_response(read, ends, sampling.stop, ids.tolist()) for ids in response_ids
            ],
        )

    @torch.no_grad()
    def log_likelihoods(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> torch.Tensor:
        """The log-likelihood of each text as the response to its prompt, in nats: (rows,) float32 on the CPU.

        Of the distribution from which responses are sampled, at its temperature; that the text ends is not part of it.

        Raises a UserError if a prompt with its text is too long.
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
        """(rows,) as of `log_likelihoods`, of token ids, a micro-batch at a time."""
        pad_id = pad_token(self.tokenizer)
        likelihoods = []
        for start in range(0, len(prompt_ids), self.pass_size.micro_batch):
            rows = slice(start, start + self.pass_size.micro_batch)
            logits = response_logits(self.policy, prompt_ids[rows], text_ids[rows], pad_id)
            logprobs = (logits.float() / self.config.sampling.temperature).log_softmax(-1)
            ids, mask = (
                to_device(part, self.device) for part in pad(text_ids[rows], pad_id, "right")
            )
            of_tokens = logprobs.gather(-1, ids[..., None]).squeeze(-1)
            likelihoods.append((of_tokens * mask).sum(1).cpu())
        return torch.cat(likelihoods)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """The policy as it answers: without dropout, and with no adapter but the agent's own."""
        self.policy.eval()
        self.activate()
        with (
            autocast(self.device, self.config.precision),
            nullcontext() if self.is_trained else without_adapters(self.policy),
            sharding.gathered(self.policy),
        ):
            yield

    def learn(
        self,
        rollouts: Sequence[Rollout],
        rewards: Sequence[torch.Tensor],
        shuffle: np.random.Generator,
    ) -> list[UpdateStats]:
        """One update on the agent's rollouts, one per role; returns the statistics of each.

        Args:
            rewards: of each rollout, the (batch,) training rewards.
            shuffle: draws the order of the rows in each epoch.

        Raises NotFinite, which names agent and role, if a loss or gradient is not finite. A frozen
        agent learns nothing, and its statistics have the rest.
        """
        if self.learner is None:
            return [
                UpdateStats(kl=0.0, response_tokens=_mean_length(rollout, self.device))
                for rollout in rollouts
            ]
        self.activate()
        self._mark_engine_outdated()
        return self.learner.update(rollouts, rewards, shuffle)

    def response_kls(self, rollout: Rollout) -> list[float]:
        """The KL of each response to the reference, in nats."""
        if self.learner is None:
            return [0.0] * len(rollout.response_ids)
        self.activate()
        return self.learner.response_kls(rollout)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The trained state for a checkpoint: weights and the optimizer's state as tensors, other numbers as JSON.

        A frozen agent has none.
        """
        return ({}, {}) if self.learner is None else self.learner.save_state()

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Restores what `state` returned. Raises a ValueError if a tensor does not fit."""
        if self.learner is not None:
            self._mark_engine_outdated()
            self.learner.load_state(tensors, numbers)

    def _mark_engine_outdated(self) -> None:
        if self.engine is not None:
            self.engine.outdated(self.name)

    def restart(self) -> None:
        """Resets optimizer state, KL coefficient and reward moments (`cory.reset_every`)."""
        if self.learner is not None:
            self.learner.restart()

    def save(self, folder: Path) -> None:
        """Writes the policy and its tokenizer as a Hugging Face or PEFT folder, without the value head."""
        self.activate()
        if save_policy(self.policy, folder, self.name if self.is_trained else None):
            self.tokenizer.save_pretrained(folder)


def _mean_length(rollout: Rollout, device: torch.device) -> float:
    """The mean length of its responses in tokens, over the rows of all processes."""
    tokens = sum(len(ids) for ids in rollout.response_ids)
    sums = distributed.all_reduce_sum(
        torch.tensor([tokens, len(rollout.response_ids)], device=device)
    )
    return (sums[0] / sums[1]).item()


# The agents of a configuration


@dataclass
class AgentPlan:
    """What one agent is made of.

    Args:
        index: from 0.
        config: its settings, its model's name resolved to a folder or a Hub id.
        device: where it samples and learns.
        learner_type: None if it does not learn.
    """

    index: int
    config: Config
    device: torch.device
    learner_type: "type[PPOLearner | GroupLearner] | None"

    @property
    def trained(self) -> bool:
        """Whether it learns."""
        return self.learner_type is not None

    @property
    def name(self) -> str:
        """`agent_1`, ..."""
        return f"agent_{self.index + 1}"

    @property
    def uses_lora(self) -> bool:
        """Whether the agent is an adapter on a base."""
        return self.config.lora.rank > 0

    def shares_base(self, other: "AgentPlan") -> bool:
        """Whether both can start from one loaded model: they copy it and share it as reference, or adapt it."""
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

    Raises a UserError if a setting is out of range, a device or a model is not available, a model
    is one that padded batches change, or an agent that should learn has no trainable weight.
    """
    config.check()
    _warn_of_other_support(config.sampling)
    plans = [_plan(config, index) for index in range(config.cory.num_agents)]

    # The process's own device, where it is about messages between processes, is the first agent's.
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
    """Raises a UserError if the agent's device or its learner's TRL is not available."""
    settings = copy.copy(config.of_agent(index))
    settings.model = replace(settings.model, name=settings.resolve(settings.model.name))
    learner_type = _learner_type(config.algorithm) if config.is_trained(index) else None
    return AgentPlan(index, settings, choose_device(settings.device), learner_type)


def _learner_type(algorithm: AlgorithmName) -> "type[PPOLearner | GroupLearner]":
    """The learner of an algorithm. Only PPO's imports TRL."""
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
    """The agents in groups that each start from one loaded model."""
    if config.device_per_agent:  # they learn at the same time
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
    """The agents of a group, all on one device, and what they share: the reference or the base."""
    config = plans[0].config
    device = plans[0].device
    base, tokenizer = load_policy(config.model, device)
    if config.model.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})

    trained = [plan for plan in plans if plan.trained]
    policies = _make_policies(plans, base)
    reference = None  # with LoRA, the policy with its adapters off
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
                    f"lora.rank: expected above 0 for {plan.name}, as the weights of {plan.config.model.name!r} are "
                    "quantized, got 0"
                )
            if not any(weight.requires_grad for weight in policy.parameters()):
                raise UserError(
                    f"model.name: expected a model with trainable weights for {plan.name}, got "
                    f"{plan.config.model.name!r}, whose weights are all frozen"
                )
            make_learner: Callable[..., Learner] = plan.learner_type
            learner = make_learner(wrapped, reference, tokenizer, plan.config, device)
        agents.append(Agent(plan.name, policy, tokenizer, plan.config, device, learner, engine))
    return agents


def _warn_of_other_support(sampling: SamplingConfig) -> None:
    """Warns if tokens are drawn from another distribution than the policy at the sampling temperature."""
    usual = SamplingConfig()
    changed = [
        f"sampling.{key}: {getattr(sampling, key):g}"
        for key in ("top_k", "top_p", "repetition_penalty")
        if getattr(sampling, key) != getattr(usual, key)
    ]
    if changed:
        warnings.warn(
            f"{', '.join(changed)}: samples are off-policy, as log-probabilities and KL are those of the whole "
            "distribution",
            stacklevel=3,
        )


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
) -> "dict[str, PolicyWithValueHead | WindowPolicy]":
    """The policies of agents that start from `base`, in their wrappers, by the agents' names."""
    policies: dict[str, PolicyWithValueHead | WindowPolicy] = {}
    adapted = base  # with the adapters so far
    trained = [plan for plan in plans if plan.trained]
    for plan in trained:
        policy = make_policy(plan, adapted)
        if plan.uses_lora:
            adapted = policy.pretrained_model
        else:  # sharded at once, so that one whole copy is in memory at a time
            policy = sharding.split(policy, plan.config.parallel, plan.config.precision)
        policies[plan.name] = policy
    # A frozen agent is the unmodified base, which the others use as reference.
    frozen = [plan for plan in plans if not plan.trained]
    for plan in frozen:
        policies[plan.name] = WindowPolicy(adapted)
    # A base with adapters is sharded when it has those of all agents.
    return {
        plan.name: sharding.split(policies[plan.name], plan.config.parallel, plan.config.precision)
        for plan in plans
    }


def make_policy(plan: AgentPlan, base: LanguageModel) -> "PolicyWithValueHead | WindowPolicy":
    """An agent's policy in its wrapper: a copy of the base, or with LoRA the base with a new adapter."""
    config = plan.config
    assert plan.learner_type is not None
    wrap = plan.learner_type.wrapper
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
    if config.algorithm == "ppo" and config.ppo.value_head_init == "zeros":
        for name, parameter in policy.named_parameters():
            if name.startswith("v_head."):
                torch.nn.init.zeros_(parameter)
    return policy
