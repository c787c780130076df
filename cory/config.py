"""The settings of a run: dataclasses whose keys are all documented, checked and read.

Every default is written here and nowhere else; it is the paper's (Table 1) where it states one. A task adds its own
block by subclassing `Config` (`imdb_train/config.py`). Command lines and YAML files: `cory/run/settings.py`.
"""

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal

from cory.run.checks import RewardError, Settings, UserError, between, changed, expect, keys, one_of, positive
from cory.run.hub import HubConfig
from cory.run.parallel import ParallelConfig
from cory.run.sampling_settings import SamplingConfig

# Checks that other files import from here.
__all__ = ["RewardError", "Settings", "UserError", "changed", "expect", "keys", "one_of"]


@dataclass
class ModelConfig(Settings):
    """The policy, which is also the reference.

    Args:
        name: Hub id, local folder, or `tiny`: the small model of the task's toy setting.
        revision: Branch, tag or commit of a Hub model.
        dtype: Type of the weights: float32, bfloat16, or `auto` for the one they were saved in.
        trust_remote_code: Whether the model's own code may run. Enable it only if you have read that code.
        quantization: 4bit (NF4) or 8bit weights of the base through bitsandbytes; with LoRA only.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time, the same numbers.
        chat_template: Render prompts as a user turn with the tokenizer's chat template. A mapping sets its options,
            such as {enable_thinking: false}.
    """

    name: str = "openai-community/gpt2"
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    trust_remote_code: bool = False
    quantization: Literal["none", "4bit", "8bit"] = "none"
    gradient_checkpointing: bool = False
    chat_template: bool | dict[str, Any] = False


@dataclass
class LoraConfig(Settings):
    """Agents as LoRA adapters; the reference is the base with adapters off.

    Args:
        rank: Rank of the adapters. 0: full fine-tuning.
        alpha: Adapters are scaled by alpha / rank.
        target_modules: Modules that get adapters. null: PEFT's choice for the architecture, or else all linear layers.
        shared_base: Whether the agents share one base in memory. Off: one copy per agent.
        merge: Save agents as full models, adapters merged, instead of PEFT folders.
    """

    rank: int = 0
    alpha: float = 32.0
    target_modules: list[str] | None = None
    shared_base: bool = True
    merge: bool = False

    def __post_init__(self) -> None:
        expect(self.rank >= 0, "lora.rank", "0 (full fine-tuning) or more", self.rank)
        positive("lora", self, "alpha")


@dataclass
class CoryConfig(Settings):
    """The method; the only block in which a single agent's run differs from a CORY run.

    Args:
        num_agents: Number of LLMs trained: 1 is the single-agent baseline, 2 the paper's pioneer and observer.
        chain_length: Number of roles in the chain; null: as many as agents. Fewer: a population, from which members are
            drawn for each period. More: agents hold several roles, so that one LLM can be both pioneer and observer.
        exchange: What happens at a role exchange. `rotate`: the chain rotates by one position (Eq. 5, for any number
            of agents); `shuffle`: roles are assigned at random, each agent equally often; `none`: nothing.
        exchange_period: Iterations between role exchanges, T_REx in Eq. 5. 0: never.
        credit: What a role is rewarded for: `collective` (Eq. 4), `causal`, `own` or `counterfactual`: docs/credit.md.
        weight: Weight of the other roles' task rewards in a role's training reward: 1 cooperative (Eq. 4), 0
            independent, negative competitive. Ignored with `credit: own`.
        other_coef: Alias of `weight`; takes precedence if both are given.
        knowledge_transfer: Whether an observer reads the response of the preceding role (Eq. 3). Off: only the query.
        reset_on_exchange: Restart every agent's optimizer, KL coefficient and reward moments at each exchange, as the
            authors' published code does.
    """

    num_agents: int = 2
    chain_length: int | None = None
    exchange: Literal["rotate", "shuffle", "none"] = "rotate"
    exchange_period: int = 5
    credit: Literal["collective", "causal", "own", "counterfactual"] = "collective"
    weight: float = 1.0
    other_coef: float | None = None
    knowledge_transfer: bool = True
    reset_on_exchange: bool = False

    def __post_init__(self) -> None:
        if self.other_coef is not None:
            self.weight, self.other_coef = self.other_coef, None
        expect(self.num_agents >= 1, "cory.num_agents", "at least 1", self.num_agents)
        length = self.roles
        expect(length >= 1, "cory.chain_length", "null (as many as agents) or at least 1", length)
        expect(self.exchange_period >= 0, "cory.exchange_period", "0 (never) or more iterations", self.exchange_period)
        expect(math.isfinite(self.weight), "cory.weight", "a finite number", self.weight)
        if length < self.num_agents and (self.exchange == "none" or not self.exchange_period):
            raise UserError(
                f"cory.exchange: expected rotate or shuffle, and an exchange_period above 0, to train "
                f"{self.num_agents} agents in a chain of {length}, got {self.exchange} and {self.exchange_period}"
            )
        if self.credit == "counterfactual" and not self.knowledge_transfer:
            raise UserError("cory.credit: expected knowledge_transfer: true with counterfactual, got false")

    @property
    def roles(self) -> int:
        """How many roles the chain has."""
        return self.num_agents if self.chain_length is None else self.chain_length


@dataclass
class PPOConfig(Settings):
    """Each agent's update (Eq. 10 to 13 for PPO); the same for every agent, and shared by all algorithms.

    Args:
        learning_rate: The optimizer's learning rate.
        schedule: Learning-rate schedule after the warm-up: `constant`, or `linear` or `cosine` decay to 0.
        warmup: Iterations over which the learning rate rises linearly from 0.
        optimizer: Name of an optimizer in torch.optim.
        optimizer_options: Further arguments of the optimizer, such as {weight_decay: 0.01}.
        batch_size: Responses per role and iteration, over all processes; `group_size` per query.
        mini_batch_size: Samples in one forward and backward pass, over all processes.
        gradient_accumulation_steps: Mini-batches per optimizer step.
        micro_batch: Samples of a mini-batch processed at a time; changes results by rounding only. `auto`: all, halved
            whenever memory runs out (one process only).
        ppo_epochs: Passes over each batch of responses.
        init_kl_coef: Initial KL coefficient eta (Eq. 2); also the eta of the combined reward throughout.
        adaptive_kl: Whether the KL coefficient follows TRL's adaptive controller. Off: it is constant.
        kl_target: Target KL of the adaptive controller, in nats per response.
        kl_horizon: Horizon of the adaptive controller, in samples.
        kl_penalty: `full`: KL over the whole vocabulary (Eq. 2); `kl`: log-ratio of the sampled token; TRL's abs, mse.
            For other algorithms, only the recorded KL.
        kl_in: Where the KL to the reference acts. `reward`: PPO's token rewards, or the responses' rewards (k1,
            sampled); `loss`: a term of the loss (k3). `auto`: the loss for GRPO, else the reward.
        gamma: Discount factor (PPO).
        lam: Lambda of the advantage estimator (GAE, Eq. 12; PPO).
        cliprange: Clip range of the probability ratio (Eq. 11).
        cliprange_value: Clip range of the value predictions (PPO).
        vf_coef: Weight beta of the value loss (Eq. 13; PPO).
        value_head_init: `random`: TRL's, whose initial values are noise on the scale of the rewards; `zeros`: no noise
            (PPO).
        max_grad_norm: Gradient norm to clip at; null for none.
        ratio_threshold: A mini-batch whose mean probability ratio exceeds this is skipped.
        reward_scaling: Divide training rewards by their running standard deviation.
        reward_normalization: With reward_scaling, also subtract their running mean.
        reward_clip: Clip training rewards to plus or minus this; null for none.
        whiten_rewards: Whiten token rewards before advantages are computed (PPO).
    """

    learning_rate: float = 1.41e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    optimizer: str = "Adam"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 256
    mini_batch_size: int = 256
    gradient_accumulation_steps: int = 1
    micro_batch: int | Literal["auto"] = "auto"
    ppo_epochs: int = 4
    init_kl_coef: float = 0.3
    adaptive_kl: bool = True
    kl_target: float = 6.0
    kl_horizon: float = 10_000.0
    kl_penalty: Literal["full", "kl", "abs", "mse"] = "full"
    kl_in: Literal["auto", "reward", "loss"] = "auto"
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    value_head_init: Literal["random", "zeros"] = "random"
    max_grad_norm: float | None = None
    ratio_threshold: float = 10.0
    reward_scaling: bool = False
    reward_normalization: bool = False
    reward_clip: float | None = None
    whiten_rewards: bool = False

    def __post_init__(self) -> None:
        positive("ppo", self, "learning_rate", "batch_size", "mini_batch_size", "gradient_accumulation_steps")
        positive("ppo", self, "ppo_epochs", "kl_target", "kl_horizon", "cliprange", "cliprange_value")
        positive("ppo", self, "ratio_threshold", "max_grad_norm", "reward_clip", "micro_batch")
        between("ppo", self, 0, 1, "gamma", "lam")
        between("ppo", self, 0, 1e6, "init_kl_coef", "vf_coef")
        expect(self.warmup >= 0, "ppo.warmup", "0 (none) or more iterations", self.warmup)
        expect(self.batch_size > 1, "ppo.batch_size", "at least 2, as advantages are whitened over it", self.batch_size)
        mini, count = self.mini_batch_size, self.gradient_accumulation_steps
        multiple = f"a multiple of mini_batch_size * gradient_accumulation_steps = {mini} * {count} = {mini * count}"
        expect(self.batch_size % (mini * count) == 0, "ppo.batch_size", multiple, self.batch_size)
        if self.reward_normalization and not self.reward_scaling:
            raise UserError("ppo.reward_normalization: expected ppo.reward_scaling: true beside it, got false")


@dataclass
class CheckpointConfig(Settings):
    """What survives an interruption (docs/reliability.md).

    Args:
        save_every: Iterations between checkpoints; one is also saved on a signal. 0: on signals only.
        save_final: Save one after the last iteration, from which the run can be extended.
        keep: Number of newest checkpoints kept.
        best: Metric whose best checkpoint is kept as well, mean over the agents, larger is better; null for none.
    """

    save_every: int = 10
    save_final: bool = True
    keep: int = 2
    best: str | None = None

    def __post_init__(self) -> None:
        expect(self.save_every >= 0, "checkpoint.save_every", "0 (at signals only) or more iterations", self.save_every)
        expect(self.keep >= 1, "checkpoint.keep", "at least 1", self.keep)


@dataclass
class GuardsConfig(Settings):
    """What is watched while a run trains.

    Args:
        on_nonfinite: A loss or gradient that is not finite never reaches the weights. `stop`: save the last good state
            and end the run; `skip`: leave out that optimizer step.
        kl_bound: KL, in nats per response, above which an iteration is flagged.
        stop_at_kl: KL above which the run saves its agents and ends early; null for never.
    """

    on_nonfinite: Literal["stop", "skip"] = "stop"
    kl_bound: float = 50.0
    stop_at_kl: float | None = None

    def __post_init__(self) -> None:
        positive("guards", self, "kl_bound", "stop_at_kl")


@dataclass
class Config(Settings):
    """One run.

    Args:
        seed: Every random choice of the run derives from it.
        iterations: Iterations of Algorithm 1, each on one batch of queries.
        algorithm: How an agent learns from its rewards: `ppo` (the paper's), `grpo`, `dr_grpo` (GRPO without its
            divisions by standard deviation and length), `rloo` or `reinforce`: docs/learners.md.
        group_size: Chains per query; GRPO and RLOO compare the responses of such a group.
        agents: Settings of individual agents, in order: a list of {model: {...}, lora: {...}, learning_rate: ...}, each
            part optional. Empty: all agents alike.
        output: Folder of the run; must not hold a run yet. null: the first free one of runs/NAME, runs/NAME-2, ...
        device: auto (CUDA where there is a GPU for it, else the CPU), cpu, cuda, cuda:N or mps (Apple; not tested).
        precision: fp32 (with TF32 matrix products on GPUs that have them), or bf16: autocast; weights keep their type.
        resume: Run to continue: the folder of a run or of one of its checkpoints, from which settings are read; or
            `auto`: the newest run with these settings, else a new run. null: a new run.
        overwrite: With `resume` of an older checkpoint: delete what the run has done since.
        accept_changes: With `resume`: `reward` accepts that the reward function has changed, and records it.
        tracker: Where metrics and sample texts go besides the run's folder. wandb works offline without an account.
        sample_every: Iterations between sample texts in samples.jsonl; 0 for none.
        eval_every: Iterations between evaluations on held-out queries, `eval_task_reward` in metrics.jsonl; 0 for none.
        eval_queries: Number of held-out queries per evaluation, from the first.
        model: The policy.
        lora: Adapters instead of full fine-tuning.
        cory: The method.
        ppo: Each agent's PPO.
        sampling: How responses are sampled.
        checkpoint: What survives an interruption.
        guards: What is watched.
        hub: Passing the agents on.
        parallel: How processes share the agents.
    """

    seed: int = 0
    iterations: int = 100
    algorithm: Literal["ppo", "grpo", "dr_grpo", "rloo", "reinforce"] = "ppo"
    group_size: int = 1
    agents: list[dict[str, Any]] = field(default_factory=list)
    output: str | None = None
    resume: str | None = None
    overwrite: bool = False
    accept_changes: Literal["none", "reward"] = "none"
    device: str = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    tracker: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    sample_every: int = 10
    eval_every: int = 0
    eval_queries: int = 64
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    cory: CoryConfig = field(default_factory=CoryConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        expect(0 <= self.seed < 2**32, "seed", "a whole number from 0 to 2**32 - 1", self.seed)
        expect(self.iterations >= 1, "iterations", "at least 1", self.iterations)
        bits = self.model.quantization
        expect(bits == "none" or self.lora.rank > 0, "model.quantization", f"lora.rank above 0 with {bits}", 0)
        if bits != "none" and self.lora.merge:
            raise UserError("lora.merge: expected false with model.quantization: rounded weights cannot be merged")
        expect(self.sample_every >= 0, "sample_every", "0 (none) or more iterations", self.sample_every)
        expect(self.eval_every >= 0, "eval_every", "0 (never) or more iterations", self.eval_every)
        expect(self.eval_queries >= 1, "eval_queries", "at least 1", self.eval_queries)
        warmup, fewer = self.ppo.warmup, f"fewer than iterations = {self.iterations}"
        expect(warmup < self.iterations, "ppo.warmup", fewer, warmup)
        if self.checkpoint.best == "eval_task_reward" and self.eval_every:
            due = f"a multiple of eval_every = {self.eval_every} with checkpoint.best: eval_task_reward"
            every = self.checkpoint.save_every
            expect(every % self.eval_every == 0, "checkpoint.save_every", due, every)
        least = 2 if self.algorithm in ("grpo", "dr_grpo", "rloo") else 1
        size, group = self.ppo.batch_size, self.group_size
        expect(group >= least, "group_size", f"at least {least} with algorithm: {self.algorithm}", group)
        expect(size % group == 0, "ppo.batch_size", f"a multiple of group_size = {group}", size)
        if self.algorithm == "ppo" and self.ppo.kl_in == "loss":
            raise UserError("ppo.kl_in: expected auto or reward with algorithm: ppo, got 'loss'")
        count, each = self.cory.num_agents, self.agents
        expect(len(each) in (0, count), "agents", f"an empty list, or an entry for each of {count} agents", each)
        for index in range(len(self.agents)):
            self.of_agent(index)

    def method(self) -> str:
        """The method in words: `PPO`, `CORY with 2 agents`, `CORY with GRPO and 3 agents`, ..."""
        agents, roles, learner = self.cory.num_agents, self.cory.roles, self.algorithm.upper()
        if agents == roles == 1:
            return learner
        count = f"{agents} agent{'s' * (agents > 1)}" + (f" in {roles} roles" if roles != agents else "")
        return f"CORY with {count}" if learner == "PPO" else f"CORY with {learner} and {count}"

    def of_agent(self, index: int) -> "Config":
        """The settings of one agent: these, with its entry of `agents`. Raises a UserError if that entry is invalid."""
        if not self.agents:
            return self
        where, changes, config = f"agents[{index}]", self.agents[index], copy(self)
        object.__setattr__(config, "agents", [])
        for key, value in changes.items():
            expect(key in ("model", "lora", "learning_rate"), where, "model, lora or learning_rate", key)
            try:
                if key == "learning_rate":
                    config.ppo = changed(self.ppo, {key: value})
                else:
                    expect(isinstance(value, dict), f"{where}.{key}", "a block of settings", value)
                    own = {"revision": None} if key == "model" and "name" in value else {}
                    setattr(config, key, changed(getattr(self, key), own | value))
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
        config.check()
        return config

    def resolve(self, name: str) -> str:
        """The folder that a model's name stands for: itself, unless the task has built-in models (`tiny`)."""
        return name
