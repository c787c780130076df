"""The settings of a run and of an evaluation, as pydantic dataclasses. Every key is documented, checked and used.

Defaults are the paper's (Table 1) where the paper gives them. A task adds its own block by subclassing `Config`
(`imdb_train/config.py`). `cory/settings.py` reads settings from files.

Assigning an unknown name, or a value with a wrong type or out of range, raises an error at once. `check()` checks
combinations of keys; it is called before settings are used.
"""

import json
import keyword
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
)
from pydantic.dataclasses import dataclass

from cory.errors import UserError
from cory.settings import Settings, changed

S = TypeVar("S", bound=Settings)
# Names with a fixed meaning in templates; roles cannot have them.
RESERVED_NAMES = ("prompt", "response", "responses")
C = TypeVar("C", bound="Config")


def _role_name(name: str | None) -> str | None:
    # Templates, and the code in a model card, use the name as an identifier.
    if name is not None and (
        not name.isidentifier() or keyword.iskeyword(name) or name in RESERVED_NAMES
    ):
        raise ValueError(
            "expected null or a name of letters, digits and _ that is neither a Python keyword nor one of "
            f"{', '.join(RESERVED_NAMES)}"
        )
    return name


def _url(url: str) -> str:
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ValueError(f"expected a URL ({error})") from None
    return url


Fraction = Annotated[float, Field(ge=0, le=1)]
OptionalPositive = Annotated[float | None, Field(gt=0)]
PositiveOrAuto = Annotated[int, Field(ge=1)] | Literal["auto"]
NotEmpty = Annotated[str, Field(min_length=1)]
AlgorithmName = Literal["ppo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce"]
# Algorithms whose loss has one probability ratio per response.
ONE_RATIO = ("rloo", "reinforce", "gspo")
EngineCorrection = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]
CreditMode = Literal["collective", "mean", "causal", "own", "counterfactual", "information"]


def compares_responses(algorithm: AlgorithmName) -> bool:
    """Whether an algorithm compares several responses to the same query."""
    return algorithm not in ("ppo", "reinforce")


@dataclass
class ModelConfig(Settings):
    """The language model that agents start from. Untrained, it is also the reference for the KL.

    Args:
        name: Hub id, local folder, or `tiny`, the small model of the task's toy configuration.
        revision: Branch, tag or commit of a Hub model.
        dtype: Type of the weights: float32, bfloat16, or `auto` for the type saved in the model's files.
        quantization: `4bit` loads the model with 4-bit weights (NF4, bitsandbytes); requires LoRA.
        gradient_checkpointing: Recompute activations in the backward pass. This saves memory, takes more time, and
            gives the same numbers.
        chat_template: Render prompts as a user turn with the tokenizer's chat template. A mapping sets the template's
            options, such as {enable_thinking: false}.
    """

    block: ClassVar[str] = "model"
    name: str = "openai-community/gpt2"
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    quantization: Literal["none", "4bit"] = "none"
    gradient_checkpointing: bool = False
    chat_template: bool | dict[str, Any] = False


@dataclass
class LoraConfig(Settings):
    """LoRA: agents are adapters on one base model, which is the reference when its adapters are off.

    Args:
        rank: Rank of the adapters. 0: full fine-tuning.
        alpha: Adapter outputs are scaled by alpha / rank.
        target_modules: Modules that get adapters. null: PEFT's default for the architecture, or all linear layers if
            it has none.
    """

    block: ClassVar[str] = "lora"
    rank: NonNegativeInt = 0
    alpha: PositiveFloat = 32.0
    target_modules: list[str] | None = None


@dataclass
class CoryConfig(Settings):
    """The method. Only this block, `branches`, `agents` and `roles` differ between CORY and the single-agent baseline.

    Args:
        num_agents: Number of LLMs, including frozen ones: 1 is the single-agent baseline, 2 the paper's pioneer and
            observer.
        chain_length: Number of roles, the positions in the chain of agents. null: one per agent. With more roles than
            agents, agents hold several, so one LLM can be both pioneer and observer.
        exchange_period: Iterations between role exchanges (T_REx, Eq. 5), which rotate roles by one agent. 0: never.
        credit: How a role's training reward is computed: `collective` (Eq. 4), `mean`, `causal`, `own`,
            `counterfactual`, or `information`, which needs a column `answer` in the data (docs/learners.md).
        weight: Weight of the other roles' task rewards in a role's training reward; with `credit: information`, weight
            of the information term (docs/learners.md). 1 is cooperative (Eq. 4), 0 independent, negative competitive.
            Ignored with `credit: own`.
        knowledge_transfer: Whether observers read earlier responses (Eq. 3). If false, they read only the query, in the
            pioneer's template.
        reset_every: Reset every agent's optimizer state, KL coefficient and running reward statistics after this many
            iterations, also in single-agent runs. The authors' published code does this every 5 iterations, only for
            CORY. 0: never.
    """

    block: ClassVar[str] = "cory"
    num_agents: PositiveInt = 2
    chain_length: Annotated[int | None, Field(ge=1)] = None
    exchange_period: NonNegativeInt = 5
    credit: CreditMode = "collective"
    weight: float = 1.0
    knowledge_transfer: bool = True
    reset_every: NonNegativeInt = 0

    def check(self) -> None:
        if self.num_roles < self.num_agents:
            raise UserError(
                f"cory.chain_length: expected a role for each of the {self.num_agents} agents, got {self.num_roles}"
            )
        if self.credit in ("counterfactual", "information") and not self.knowledge_transfer:
            raise UserError(
                "cory.credit: expected collective, mean, causal or own with cory.knowledge_transfer: false, "
                f"got {self.credit}"
            )
        if self.credit == "information" and self.num_roles > 2:
            raise UserError(
                "cory.credit: expected collective, mean, causal, own or counterfactual with "
                f"{self.num_roles} roles, got information"
            )

    @property
    def num_roles(self) -> int:
        """Number of roles in the chain."""
        return self.num_agents if self.chain_length is None else self.chain_length


@dataclass
class AgentConfig(Settings):
    """One entry of the list `agents`: an agent's differences from the run's settings.

    Args:
        model: Keys of `model` that differ, such as {name: ...}. If the name differs, the run's revision does not apply.
        lora: Keys of `lora` that differ, such as {rank: ...}.
        learning_rate: Adam's learning rate. null: ppo.learning_rate.
        init_kl_coef: Initial KL coefficient of this agent's updates. null: ppo.init_kl_coef. The combined reward
            uses ppo.init_kl_coef for every agent.
        device: Device of this agent, set for all agents or for none. Agents with devices are updated at the same
            time, even if their devices are the same (docs/scaling.md). null: the run's device.
        trained: Whether the agent learns. If false, it is frozen and only answers.
    """

    block: ClassVar[str] = "agents"
    model: dict[str, Any] = Field(default_factory=dict)
    lora: dict[str, Any] = Field(default_factory=dict)
    learning_rate: OptionalPositive = None
    init_kl_coef: Annotated[float | None, Field(ge=0, le=1e6)] = None
    device: str | None = None
    trained: bool = True

    def of_ppo(self) -> dict[str, Any]:
        """Returns the keys of `ppo` that differ."""
        values = {"learning_rate": self.learning_rate, "init_kl_coef": self.init_kl_coef}
        return {key: value for key, value in values.items() if value is not None}


@dataclass
class RoleConfig(Settings):
    """One entry of the list `roles`: a role's differences from the defaults.

    Args:
        name: Name in metrics, reports and templates. null: pioneer, observer, observer_2, ...
        prompt: Template with the placeholders {prompt}, {response} (the preceding role's response), {responses} (all
            earlier responses, joined by blank lines), the names of earlier roles, and the dataset's columns.
            Alternatively, FILE.py:FUNCTION, which returns the prompt (docs/own_task.md). null: the task's template.
        max_new_tokens: Length limit of the role's responses in every batch. null: each batch's limit (`sampling`).
        stop: Texts that end a response. null: sampling.stop.
    """

    block: ClassVar[str] = "roles"
    name: Annotated[str | None, AfterValidator(_role_name)] = None
    prompt: str | None = None
    max_new_tokens: Annotated[int | None, Field(ge=1)] = None
    stop: list[NotEmpty] | None = None

    def sampling(self, common: "SamplingConfig") -> "SamplingConfig":
        """Returns `common` with this role's length limit and stop texts, if it has any."""
        return replace(
            common,
            max_new_tokens=self.max_new_tokens or common.max_new_tokens,
            stop=common.stop if self.stop is None else self.stop,
        )


def _from_mapping(kind: type[S]) -> BeforeValidator:
    """Returns a validator that accepts a mapping as a list entry in Python code, as in files."""
    adapter = TypeAdapter(kind)
    return BeforeValidator(
        lambda entry: adapter.validate_json(json.dumps(entry)) if isinstance(entry, dict) else entry
    )


def role_name(role: int) -> str:
    """Returns the default name of a role: `pioneer`, `observer`, then `observer_2`, ..."""
    return ("pioneer", "observer")[role] if role < 2 else f"observer_{role}"


@dataclass
class PPOConfig(Settings):
    """Each agent's update (Eq. 10 to 13 for PPO). The keys apply to all agents and, unless marked PPO, all algorithms.

    Args:
        learning_rate: Adam's learning rate.
        warmup_iterations: Iterations over which the learning rate rises linearly from 0. 0: constant.
        batch_size: Responses per role and iteration, over all processes; `group_size` per query.
        mini_batch_size: Responses per gradient, over all processes.
        gradient_accumulation_steps: Mini-batches per optimizer step; all have the same weight, however many tokens they
            hold. To save memory without changing the update, set `micro_batch` instead.
        micro_batch: Responses per forward and backward pass, in each process. It changes results only by rounding. With
            smaller micro-batches, fewer responses share an encoded prompt, and the first optimizer step cannot reuse
            the forward pass that measured the KL. `auto`: the mini-batch, or fewer responses if an array (responses,
            response tokens, vocabulary) would exceed 1 GiB on a CPU or 4 GiB on a GPU. In a single process, `auto` also
            halves the number whenever memory runs out.
        ppo_epochs: Passes over each batch of responses.
        init_kl_coef: Initial KL coefficient eta (Eq. 2). The combined reward, r - eta * KL, uses this value throughout.
        adaptive_kl: Whether the KL coefficient follows TRL's adaptive controller. If false, it is constant.
        kl_target: Target KL of the adaptive controller, in nats per response.
        kl_horizon: Horizon of the adaptive controller, in responses. An update counts as batch_size responses, even if
            the agent has several roles.
        kl_penalty: `full`: KL over the whole vocabulary (Eq. 2); `kl`: the sampled KL, the log-ratio of the sampled
            token (docs/paper.md). With algorithms other than PPO, it affects only the recorded KL, which the adaptive
            controller follows.
        gamma: Discount factor (PPO).
        lam: Lambda of the advantage estimator (GAE, Eq. 12; PPO).
        cliprange: Clip range of the probability ratio (Eq. 11).
        cliprange_high: Clip range of ratios above 1, as in DAPO. null: cliprange.
        cliprange_value: Clip range of the value predictions (PPO).
        vf_coef: Weight beta of the value loss (Eq. 13; PPO).
        value_head_init: Initial value head (PPO). `random`: TRL's initialization; values start as noise on the scale of
            the rewards. `zeros`: values start at 0.
        max_grad_norm: Largest gradient norm; longer gradients are clipped to it. null: no clipping.
        ratio_threshold: Largest mean probability ratio of a mini-batch. Above it, the gradient is set to zero and the
            step is counted in `dropped_steps`. The mean is over tokens. With reinforce and rloo, a token's ratio is its
            whole response's ratio; with gspo, the geometric mean of the response's token ratios.
        reward_scaling: Divide training rewards by their running standard deviation, unless all so far have been equal.
        reward_normalization: With reward_scaling, also subtract their running mean.
    """

    block: ClassVar[str] = "ppo"
    learning_rate: PositiveFloat = 1.41e-5
    warmup_iterations: NonNegativeInt = 0
    batch_size: Annotated[int, Field(ge=2)] = 256  # advantages are whitened over the batch
    mini_batch_size: PositiveInt = 256
    gradient_accumulation_steps: PositiveInt = 1
    micro_batch: PositiveOrAuto = "auto"
    ppo_epochs: PositiveInt = 4
    init_kl_coef: Annotated[float, Field(ge=0, le=1e6)] = 0.3
    adaptive_kl: bool = True
    kl_target: PositiveFloat = 6.0
    kl_horizon: PositiveFloat = 10_000.0
    kl_penalty: Literal["full", "kl"] = "full"
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    cliprange: PositiveFloat = 0.2
    cliprange_high: OptionalPositive = None
    cliprange_value: PositiveFloat = 0.2
    vf_coef: Annotated[float, Field(ge=0, le=1e6)] = 0.1
    value_head_init: Literal["random", "zeros"] = "random"
    max_grad_norm: OptionalPositive = None
    ratio_threshold: PositiveFloat = 10.0
    reward_scaling: bool = False
    reward_normalization: bool = False

    def check(self) -> None:
        per_step = self.mini_batch_size * self.gradient_accumulation_steps
        if self.batch_size % per_step:
            raise UserError(
                f"ppo.batch_size: expected a multiple of mini_batch_size * gradient_accumulation_steps = "
                f"{self.mini_batch_size} * {self.gradient_accumulation_steps} = {per_step}, got {self.batch_size}"
            )
        # TRL's controller multiplies the coefficient by at least 1 - 0.2 * batch_size / kl_horizon.
        if self.adaptive_kl and 0.2 * self.batch_size >= self.kl_horizon:
            raise UserError(
                f"ppo.batch_size: expected less than 5 * ppo.kl_horizon = {5 * self.kl_horizon:g}, got "
                f"{self.batch_size}. The KL coefficient could become negative; raise ppo.kl_horizon for larger batches"
            )
        if self.reward_normalization and not self.reward_scaling:
            raise UserError(
                "ppo.reward_normalization: expected false with ppo.reward_scaling: false, got true"
            )


@dataclass
class SamplingConfig(Settings):
    """How responses are sampled. Each batch has a random length limit from [min_new_tokens, max_new_tokens]; responses
    may be shorter.

    Args:
        min_new_tokens: Smallest length limit.
        max_new_tokens: Largest length limit.
        temperature: Softmax temperature of sampling and of all log-probabilities, so that losses, KL and entropy
            describe the sampled distribution. Must be 1 with vllm.
        top_k: Sample from the k likeliest tokens; 0 for all. top_k, top_p and repetition_penalty make samples
            off-policy.
        top_p: Sample from the likeliest tokens with this total probability; 1 for all.
        repetition_penalty: Penalty on tokens that occurred already; 1 for none.
        stop: Texts that end a response, like the end token. The response's text is cut before the stop text.
        engine: Sampler used in training: `native`, the policy itself, or `vllm`, a server that receives the agents'
            weights after each update (docs/scaling.md).
        engine_url: Address of the vLLM server. It serves one run at a time and needs access to the run's folder.
        engine_correction: With vllm, advantages are multiplied by the probability ratio policy / engine, per token or
            per sequence (docs/learners.md). `truncate` lowers ratios above the cap to the cap, `mask` sets them to 0.
            `none`: advantages are not multiplied.
        engine_correction_cap: Cap on the ratios in engine_correction.
    """

    block: ClassVar[str] = "sampling"
    min_new_tokens: PositiveInt = 4
    max_new_tokens: PositiveInt = 16
    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repetition_penalty: PositiveFloat = 1.0
    stop: list[NotEmpty] = Field(default_factory=list)
    engine: Literal["native", "vllm"] = "native"
    engine_url: Annotated[str, Field(pattern="^https?://"), AfterValidator(_url)] = (
        "http://127.0.0.1:8000"
    )
    engine_correction: EngineCorrection = "sequence_mask"
    engine_correction_cap: PositiveFloat = 3.0

    def check(self) -> None:
        if self.max_new_tokens < self.min_new_tokens:
            raise UserError(
                f"sampling.max_new_tokens: expected at least min_new_tokens = {self.min_new_tokens}, "
                f"got {self.max_new_tokens}"
            )
        changes_support = self.top_k or self.top_p < 1 or self.repetition_penalty != 1
        if self.engine == "vllm" and self.engine_correction != "none" and changes_support:
            # The server's log-probabilities describe the whole distribution, not the truncated one that it samples.
            raise UserError(
                "sampling.engine_correction: expected none with top_k, top_p or repetition_penalty, got "
                f"{self.engine_correction}"
            )
        if self.engine == "vllm" and self.temperature != 1:
            # By default, a server returns log-probabilities at temperature 1, and does not say at which it does.
            raise UserError(
                f"sampling.temperature: expected 1 with engine: vllm, got {self.temperature}"
            )

    def after_training(self, changes: Mapping[str, Any]) -> "SamplingConfig":
        """Returns these settings with `changes`, for a trained agent: no engine, and `max_new_tokens` as the limit."""
        for key in changes:
            if key.startswith("engine"):
                raise UserError(
                    f"sampling.{key}: expected no value, got {changes[key]!r}. Trained agents sample without an engine"
                )
        if "min_new_tokens" in changes:
            raise UserError(
                f"sampling.min_new_tokens: expected no value, got {changes['min_new_tokens']!r}. Set only "
                "sampling.max_new_tokens; after training, the length limit is not drawn at random"
            )
        return changed(replace(self, min_new_tokens=1, engine="native"), changes)


@dataclass
class CheckpointConfig(Settings):
    """Checkpoints, from which an interrupted run resumes (docs/reliability.md).

    Args:
        save_every: Iterations between checkpoints. A further checkpoint is saved when a signal interrupts the run, and
            when the run ends. 0: only these further checkpoints.
        keep: Number of newest checkpoints to keep.
    """

    block: ClassVar[str] = "checkpoint"
    save_every: NonNegativeInt = 10
    keep: PositiveInt = 2


@dataclass
class GuardsConfig(Settings):
    """Limits that flag iterations or end a run early.

    Args:
        kl_bound: KL, in nats per response, above which an iteration is flagged.
        stop_at_kl: KL above which the run saves its agents and ends early. null: never.
        patience: End the run early after this many held-out evaluations (`eval_every`) without a better reward (task
            reward plus team reward). RUN/best keeps the best agents. null: no early stopping, and no RUN/best.
    """

    block: ClassVar[str] = "guards"
    kl_bound: PositiveFloat = 50.0
    stop_at_kl: OptionalPositive = None
    patience: Annotated[int | None, Field(ge=1)] = None


@dataclass
class ParallelConfig(Settings):
    """How several processes, started by torchrun or accelerate launch, share the agents (docs/scaling.md).

    Args:
        shard: `full`: policies, references, gradients and optimizer states are sharded over the processes, layer by
            layer (PyTorch's FSDP2). `none`: each process holds a full copy.
    """

    block: ClassVar[str] = "parallel"
    shard: Literal["none", "full"] = "none"


@dataclass
class Config(Settings):
    """One run.

    Args:
        seed: Seed of every random choice in the run.
        iterations: Iterations of Algorithm 1, each on one batch of queries.
        algorithm: How agents learn from their rewards: `ppo` (the paper's), `grpo`, `dr_grpo` (GRPO without dividing
            by standard deviation and length), `dapo` (GRPO averaged over the batch's tokens, without truncated
            responses), `gspo` (GRPO with one ratio per response), `rloo` or `reinforce`. See docs/learners.md.
        group_size: Number of chains that answer each query. GRPO and RLOO compare the responses within this group.
            `auto`: 1 for PPO and REINFORCE, else 4.
        branches: Number of observer responses to each pioneer response, in chains of two roles. The pioneer then has
            ppo.batch_size / branches responses (docs/learners.md).
        agents: Settings of individual agents, in order: a list of {model: {...}, lora: {...}, learning_rate: ...,
            init_kl_coef: ..., device: ..., trained: ...}, each key optional. Empty: all agents share the same settings.
        roles: Settings of individual roles, in order: a list of {name: ..., prompt: ..., max_new_tokens: ..., stop:
            [...]}, each key optional (docs/own_task.md). Empty: pioneer, observer, observer_2, ... with the task's
            prompts.
        output: Folder of the run, which must not contain a run yet. null: runs/NAME, or the first unused one of
            runs/NAME-2, runs/NAME-3, ...
        device: cpu, cuda, cuda:N, or auto: CUDA if available, with one GPU per process, else the CPU.
        precision: fp32 (with TF32 matrix products on GPUs that support it), or bf16 (autocast). Weights keep their
            type.
        resume: Folder of a run, which is continued from its newest checkpoint with the settings saved in it. `auto`:
            continue the run in `output` if it has a checkpoint, else start a new one there. null: start a new run.
        tracker: Tracker that also receives the metrics. wandb needs an account, or WANDB_MODE=offline.
        sample_every: Iterations between sample texts in samples.jsonl. 0: none.
        eval_every: Iterations between evaluations on held-out queries, recorded as `eval_task_reward` in metrics.jsonl.
            The first evaluation takes place before training. 0: none.
        eval_queries: Number of held-out queries per evaluation; the first ones of the held-out data are used.
        callbacks: FILE.py:NAME of a class derived from `cory.Callback`, or a list of such names (docs/own_task.md).
        model: The language model.
        lora: Adapters instead of full fine-tuning.
        cory: The method.
        ppo: Each agent's learner, for all algorithms.
        sampling: How responses are sampled.
        checkpoint: Checkpoints, from which an interrupted run resumes.
        guards: Limits that flag iterations or end a run early.
        parallel: How processes share the agents.
    """

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    iterations: PositiveInt = 100
    algorithm: AlgorithmName = "ppo"
    group_size: PositiveOrAuto = "auto"
    branches: PositiveInt = 1
    agents: list[Annotated[AgentConfig, _from_mapping(AgentConfig)]] = Field(default_factory=list)
    roles: list[Annotated[RoleConfig, _from_mapping(RoleConfig)]] = Field(default_factory=list)
    output: str | None = None
    resume: str | None = None
    device: str = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    tracker: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    sample_every: NonNegativeInt = 10
    eval_every: NonNegativeInt = 0
    eval_queries: PositiveInt = 64
    callbacks: list[str] | str = Field(default_factory=list)
    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    cory: CoryConfig = Field(default_factory=CoryConfig)
    ppo: PPOConfig = Field(default_factory=PPOConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    guards: GuardsConfig = Field(default_factory=GuardsConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)

    def check(self) -> None:
        super().check()
        # Settings of individual agents are checked below.
        if self.model.quantization != "none" and not self.agents and self.lora.rank == 0:
            raise UserError(
                f"model.quantization: expected lora.rank above 0 with {self.model.quantization}, got 0"
            )
        if self.guards.patience is not None and not self.eval_every:
            raise UserError(
                f"guards.patience: expected null without eval_every, got {self.guards.patience}"
            )
        if compares_responses(self.algorithm) and self.chains_per_query < 2:
            raise UserError(
                f"group_size: expected at least 2 with algorithm: {self.algorithm}, got {self.group_size}"
            )
        per_token = self.sampling.engine_correction.startswith("token")
        if self.sampling.engine == "vllm" and per_token and self.algorithm in ONE_RATIO:
            raise UserError(
                f"sampling.engine_correction: expected none, sequence_truncate or sequence_mask with {self.algorithm}, "
                f"got {self.sampling.engine_correction}. This algorithm's loss has one ratio per response"
            )
        if self.branches > 1 and self.cory.num_roles != 2:
            raise UserError(
                f"branches: expected 1 in a chain of {self.cory.num_roles} roles, got {self.branches}. Only chains of "
                "two roles can have branches"
            )
        if self.branches > 1 and not self.cory.knowledge_transfer:
            raise UserError(
                f"branches: expected 1 with cory.knowledge_transfer: false, got {self.branches}"
            )
        self.check_batch(processes=1)
        self._check_roles()
        if self.agents and len(self.agents) != self.cory.num_agents:
            raise UserError(
                f"agents: expected an empty list, or an entry for each of {self.cory.num_agents} agents, "
                f"got {len(self.agents)}"
            )
        for index, agent in enumerate(self.agents):
            self.of_agent(index)  # merging an agent's settings validates its entry
            if self.device_per_agent and agent.device is None:
                raise UserError(
                    f"agents.{index}.device: expected a device, got none. Set it for all agents, or for none"
                )
        self._check_frozen()

    def check_batch(self, processes: int) -> None:
        """Checks that each of several processes gets whole queries, and enough of them. Raises a UserError."""
        share = self.ppo.batch_size // processes
        per_process = "" if processes == 1 else f" in each of {processes} processes"
        per_query = self.chains_per_query * self.branches
        factor = "group_size" if self.branches == 1 else "group_size * branches"
        if share % per_query:
            raise UserError(
                f"ppo.batch_size: expected a multiple of {factor} = {per_query}{per_process}, got {share}"
            )
        needs_others = self.cory.credit == "information" and self.cory.num_roles > 1
        if needs_others and share < 2 * per_query:
            raise UserError(
                f"ppo.batch_size: expected at least 2 * {factor} = {2 * per_query}{per_process} with "
                f"cory.credit: information, got {share}. This mode compares responses to different queries"
            )
        fewest = max(2 // processes, self.ppo.gradient_accumulation_steps)
        if self.branches > 1 and share // self.branches < fewest:
            raise UserError(
                f"branches: expected at most {share // fewest}, got {self.branches}. The pioneer needs {fewest} "
                f"responses{per_process}"
            )

    def _check_roles(self) -> None:
        """Checks that each role has an entry, that names differ, and that no prompt is set without transfer."""
        if not self.roles:
            return
        if len(self.roles) != self.cory.num_roles:
            raise UserError(
                f"roles: expected an empty list, or an entry for each of {self.cory.num_roles} roles, "
                f"got {len(self.roles)}"
            )
        names = [role.name or role_name(index) for index, role in enumerate(self.roles)]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise UserError(
                    f"roles.{index}.name: expected a name that no earlier role has, got {name!r}"
                )
        for index, role in enumerate(self.roles):
            if role.prompt is not None and not self.cory.knowledge_transfer:
                raise UserError(
                    f"roles.{index}.prompt: expected null with cory.knowledge_transfer: false, got {role.prompt!r}. "
                    "Without knowledge transfer, every role reads the query in the pioneer's template"
                )

    def _check_frozen(self) -> None:
        frozen = {index: agent for index, agent in enumerate(self.agents) if not agent.trained}
        if frozen and len(frozen) == len(self.agents):
            raise UserError("agents: expected at least one with trained: true, got none")
        for index, agent in frozen.items():
            for key, value in agent.of_ppo().items():
                raise UserError(
                    f"agents.{index}.{key}: expected null with trained: false, got {value}"
                )
            if agent.lora:
                raise UserError(
                    f"agents.{index}.lora: expected nothing with trained: false, got {agent.lora}"
                )
            if self.sampling.engine != "native":
                raise UserError(
                    f"agents.{index}.trained: expected true with "
                    f"sampling.engine: {self.sampling.engine}, got false"
                )

    @property
    def device_per_agent(self) -> bool:
        """Whether agents have their own devices and are therefore updated at the same time."""
        return any(agent.device is not None for agent in self.agents)

    def keep_first_agent(self) -> None:
        """Keeps only the first agent, in the first role."""
        self.cory.num_agents = 1
        self.cory.chain_length = None
        self.agents = self.agents[:1]
        self.roles = self.roles[:1]
        self.branches = 1

    def on(self: C, device: str) -> C:
        """Returns these settings with all agents on one device."""
        config = copy(self)
        config.device = device
        config.agents = [replace(agent, device=None) for agent in self.agents]
        return config

    @property
    def longest_response(self) -> int:
        """The largest length limit of any role, in tokens."""
        limits = [role.max_new_tokens for role in self.roles if role.max_new_tokens is not None]
        return max([self.sampling.max_new_tokens, *limits])

    @property
    def chains_per_query(self) -> int:
        """Number of chains that answer each query: `group_size`, with `auto` resolved."""
        if self.group_size != "auto":
            return self.group_size
        return 4 if compares_responses(self.algorithm) else 1

    @property
    def queries_per_iteration(self) -> int:
        """Number of queries in an iteration, over all processes."""
        return self.ppo.batch_size // (self.chains_per_query * self.branches)

    def method(self) -> str:
        """Describes the method: `PPO`, `CORY with 2 agents`, `CORY with GRPO and 3 agents`, ..."""
        agents, roles, learner = self.cory.num_agents, self.cory.num_roles, self.algorithm.upper()
        if agents == roles == 1:
            return learner
        count = f"{agents} agent{'s' * (agents > 1)}" + (
            f" in {roles} roles" if roles != agents else ""
        )
        frozen = sum(not self.is_trained(index) for index in range(agents))
        if frozen:
            count += f", {frozen} of them frozen"
        return f"CORY with {count}" if learner == "PPO" else f"CORY with {learner} and {count}"

    def of_agent(self, index: int) -> "Config":
        """Returns these settings, merged with one agent's entry in `agents`. Raises a UserError if it is invalid."""
        if not self.agents:
            return self
        agent = self.agents[index]
        config = copy(self)
        config.agents = []
        if agent.device is not None:
            config.device = agent.device
        config.ppo = replace(self.ppo, **agent.of_ppo())
        # The run's revision belongs to the run's model, so it does not apply to an agent with another model.
        is_other = agent.model.get("name", self.model.name) != self.model.name
        other_model = {"revision": None} if is_other else {}
        try:
            config.model = changed(self.model, other_model | agent.model)
            config.lora = changed(self.lora, agent.lora)
            if agent.trained:
                config.check()
        except UserError as error:
            raise UserError(f"agents.{index}.{error}") from None
        if not agent.trained:
            config.lora = replace(self.lora, rank=0)  # a frozen agent has no adapter to train
        return config

    def is_trained(self, index: int) -> bool:
        """Whether agent `index` (from 0) learns; a frozen agent only answers."""
        return not self.agents or self.agents[index].trained

    def resolve(self, name: str) -> str:
        """Returns a model's folder or Hub id: `name` itself, unless a task overrides this method to resolve `tiny`."""
        return name


@dataclass
class EvaluationConfig(Settings):
    """The models to compare, and how they are evaluated.

    Args:
        models: Hub ids, local folders, or folders of runs. All agents of a run are evaluated.
        base: Reference model for the KL, shown first. null: the model that the first run started from; without a run,
            the first of `models`.
        task: Changes to the first run's `task` block: --task.dataset, --task.reward_model, ...
        model: Changes to the `model` block of every model: --model.chat_template,
            --model.quantization, ...
        sampling: Changes to the first run's `sampling` block: --sampling.temperature,
            --sampling.max_new_tokens, ...
        split: Held-out split. null: `task.eval_split` of the first run, or test for IMDB and GSM8K. If a run's best
            agents were chosen on that split, name another one.
        queries: Number of queries; the first ones of the split are used. 0: all.
        samples: Responses sampled per query.
        ks: Values of k for pass@k, at most `samples`. pass@k is omitted if any reward is neither 0 nor 1. Empty: none.
        greedy: Also answer each query once by greedy decoding.
        only: The one run to evaluate. Base, task and sampling still come from the first of `models`, so that results
            are comparable with an earlier evaluation. null: evaluate all runs.
        kl_coef: eta of the combined reward. null: the first run's initial KL coefficient, or 0.3.
        batch_size: Responses sampled at a time. The samples depend on this value.
        precision: fp32, or bf16 (autocast), which is faster on hardware that supports it. Weights keep their type.
        seed: Seed of sampling and, on IMDB, of the queries' lengths.
        device: auto, cpu, cuda or cuda:N.
        output: Folder of the results, new or empty. null: a new folder under runs/, named after the models.
        shown: Number of queries whose responses report.html shows side by side.
    """

    models: list[str] = Field(default_factory=list)
    base: str | None = None
    task: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)
    sampling: dict[str, Any] = Field(default_factory=dict)
    split: str | None = None
    queries: NonNegativeInt = 500
    samples: PositiveInt = 1
    ks: list[int] = Field(default_factory=list)
    greedy: bool = False
    only: str | None = None
    kl_coef: float | None = None
    batch_size: PositiveInt = 100
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: NonNegativeInt = 0
    device: str = "auto"
    output: str | None = None
    shown: NonNegativeInt = 100

    def check(self) -> None:
        for k in self.ks:
            if not 1 <= k <= self.samples:
                raise UserError(f"ks: expected numbers from 1 to samples, {self.samples}, got {k}")
        if "name" in self.model:
            raise UserError(
                f"model.name: expected none, got {self.model['name']!r}. --base names the KL's reference model"
            )
