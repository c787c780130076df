"""The settings of a run: dataclasses whose keys are all documented, checked and read.

Every default is written here and nowhere else; it is the paper's (Table 1) where it states one. A task adds its own
block by subclassing `Config` (`imdb_train/config.py`). Command lines and YAML files: `cory/run/settings.py`.
"""

import difflib
import math
import types
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class UserError(Exception):
    """Something the user can mend: the message says what was expected, what came and where. Shown without traceback."""


def expect(ok: bool, where: str, expected: str, came: Any) -> None:
    """Raises the UserError "WHERE: expected EXPECTED, got CAME" unless `ok`."""
    if not ok:
        raise UserError(f"{where}: expected {expected}, got {came!r}")


def _positive(block: str, settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value not in (None, "auto"):  # a key whose type has neither refuses them where they are assigned
            expect(value > 0 and math.isfinite(value), f"{block}.{name}", "a number above 0", value)


def _between(block: str, settings: Any, low: float, high: float, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        expect(low <= value <= high, f"{block}.{name}", f"a number from {low:g} to {high:g}", value)


@dataclass
class Settings:
    """A block of settings. An unknown name, or a value of another type, is refused where it is assigned."""

    def __setattr__(self, name: str, value: Any) -> None:
        hints = get_type_hints(type(self))
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else f", which has {', '.join(hints)}"
            raise UserError(f"{type(self).__name__}: unknown key {name!r}{hint}")
        kind = hints[name] if get_origin(hints[name]) else hints[name].__name__
        expected = str(kind).replace("typing.", "").replace("NoneType", "None")
        expect(_fits(value, hints[name]), f"{type(self).__name__}.{name}", expected, value)
        object.__setattr__(self, name, value)

    def check(self) -> None:
        """Checks ranges and combinations again, for settings that were assigned since. Raises a UserError."""
        for value in vars(self).values():
            if isinstance(value, Settings):
                value.check()
        getattr(self, "__post_init__", lambda: None)()


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has a field's type. An int will do for a float; a bool is no number."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in parts)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, parts[0]) for each in value)
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


@dataclass
class ModelConfig(Settings):
    """The policy, which is also the reference.

    Args:
        name: Hub id, local folder, or `tiny`: the small model of the task's toy setting.
        revision: Branch, tag or commit of a Hub model.
        dtype: Type of the weights: float32, bfloat16, or `auto` for the one they were saved in.
        trust_remote_code: Whether code that comes with the model may run. Off unless you have read it.
        quantization: 4bit (NF4) or 8bit weights of the base through bitsandbytes; with LoRA only.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time, the same numbers.
        chat_template: Render prompts as a user's turn with the tokenizer's chat template.
    """

    name: str = "openai-community/gpt2"
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    trust_remote_code: bool = False
    quantization: Literal["none", "4bit", "8bit"] = "none"
    gradient_checkpointing: bool = False
    chat_template: bool = False


@dataclass
class LoraConfig(Settings):
    """Agents as LoRA adapters; the reference is the base with adapters off.

    Args:
        rank: Rank of the adapters. 0: full fine-tuning.
        alpha: Scale of the adapters, over rank.
        target_modules: Modules that get adapters. null: PEFT's choice for the architecture, or else all linear layers.
        shared_base: Whether the agents share one base in memory. Off: a copy for each.
        merge: Save agents as full models, adapters merged, instead of PEFT folders.
    """

    rank: int = 0
    alpha: float = 32.0
    target_modules: list[str] | None = None
    shared_base: bool = True
    merge: bool = False

    def __post_init__(self) -> None:
        expect(self.rank >= 0, "lora.rank", "0 (full fine-tuning) or more", self.rank)
        _positive("lora", self, "alpha")


@dataclass
class CoryConfig(Settings):
    """The method; the block in which a PPO run differs from a CORY run.

    Args:
        num_agents: Agents in the chain: 1 is PPO, 2 the paper's pioneer and observer.
        exchange_period: Iterations between role exchanges, T_REx in Eq. 5. 0 is never.
        other_coef: Weight of the other agents' task rewards in an agent's own: 1 cooperative (Eq. 4), 0 independent,
            negative competitive.
        knowledge_transfer: Whether an observer reads the response of the role before it (Eq. 3). Off: only the query.
        reset_on_exchange: Restart every agent's optimizer, KL coefficient and reward moments at each exchange, as the
            authors' published code does.
    """

    num_agents: int = 2
    exchange_period: int = 5
    other_coef: float = 1.0
    knowledge_transfer: bool = True
    reset_on_exchange: bool = False

    def __post_init__(self) -> None:
        expect(self.num_agents >= 1, "cory.num_agents", "at least 1", self.num_agents)
        expect(self.exchange_period >= 0, "cory.exchange_period", "0 (never) or more iterations", self.exchange_period)
        expect(math.isfinite(self.other_coef), "cory.other_coef", "a finite number", self.other_coef)


@dataclass
class PPOConfig(Settings):
    """Each agent's PPO (Eq. 10 to 13); the same for every agent.

    Args:
        learning_rate: Adam's learning rate.
        batch_size: Queries per iteration, over all processes; every agent answers each of them.
        mini_batch_size: Samples in one forward and backward pass, over all processes.
        gradient_accumulation_steps: Mini-batches per optimizer step.
        micro_batch: Samples of a mini-batch that are in memory at a time; changes no number beyond rounding. `auto`:
            all, and half as many whenever memory runs out (one process only).
        ppo_epochs: Passes over each batch of responses.
        init_kl_coef: KL coefficient eta (Eq. 2) at the start; the eta of the combined reward throughout.
        adaptive_kl: Whether the KL coefficient follows TRL's adaptive controller. Off: it stays.
        kl_target: KL, in nats per response, that the adaptive controller aims at.
        kl_horizon: Samples over which the adaptive controller moves.
        kl_penalty: `full`: KL over the whole vocabulary (Eq. 2); `kl`: log-ratio of the sampled token; TRL's abs, mse.
        gamma: Discount factor.
        lam: Lambda of the advantage estimator (GAE, Eq. 12).
        cliprange: Clip range of the probability ratio (Eq. 11).
        cliprange_value: Clip range of the value predictions.
        vf_coef: Weight beta of the value loss (Eq. 13).
        value_head_init: `random`: TRL's, whose first values are noise of the rewards' own size; `zeros`: no noise.
        max_grad_norm: Gradient norm to clip at; null for none.
        ratio_threshold: A mini-batch whose mean probability ratio exceeds this is skipped.
        reward_scaling: Divide training rewards by their running standard deviation.
        reward_normalization: With reward_scaling, also subtract their running mean.
        reward_clip: Clip training rewards to plus or minus this; null for none.
        whiten_rewards: Whiten token rewards before advantages are computed.
    """

    learning_rate: float = 1.41e-5
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
        _positive("ppo", self, "learning_rate", "batch_size", "mini_batch_size", "gradient_accumulation_steps")
        _positive("ppo", self, "ppo_epochs", "kl_target", "kl_horizon", "cliprange", "cliprange_value")
        _positive("ppo", self, "ratio_threshold", "max_grad_norm", "reward_clip", "micro_batch")
        _between("ppo", self, 0, 1, "gamma", "lam")
        _between("ppo", self, 0, 1e6, "init_kl_coef", "vf_coef")
        expect(self.batch_size > 1, "ppo.batch_size", "at least 2, as advantages are whitened over it", self.batch_size)
        mini, count = self.mini_batch_size, self.gradient_accumulation_steps
        multiple = f"a multiple of mini_batch_size * gradient_accumulation_steps = {mini} * {count} = {mini * count}"
        expect(self.batch_size % (mini * count) == 0, "ppo.batch_size", multiple, self.batch_size)
        if self.reward_normalization and not self.reward_scaling:
            raise UserError("ppo.reward_normalization: expected ppo.reward_scaling: true beside it, got false")


@dataclass
class SamplingConfig(Settings):
    """How responses are sampled. One length is drawn per batch, and every agent's responses stop there at the latest.

    Args:
        min_new_tokens: Shortest length that is drawn.
        max_new_tokens: Longest length that is drawn.
        temperature: Softmax temperature. Other than 1, samples are off-policy for PPO's log-probabilities.
        top_k: Sample among the k likeliest tokens; 0 for all.
        top_p: Sample among the likeliest tokens of this total probability; 1 for all.
        repetition_penalty: Penalty on tokens that occurred already; 1 for none.
        stop: Texts that end a response, as the end token does; the text handed on is cut before them.
    """

    min_new_tokens: int = 4
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _positive("sampling", self, "min_new_tokens", "temperature", "top_p", "repetition_penalty")
        _between("sampling", self, 0, 1, "top_p")
        expect(all(self.stop), "sampling.stop", "texts that are not empty", self.stop)
        expect(self.top_k >= 0, "sampling.top_k", "0 (all tokens) or more", self.top_k)
        shortest, longest = self.min_new_tokens, self.max_new_tokens
        expect(longest >= shortest, "sampling.max_new_tokens", f"at least min_new_tokens = {shortest}", longest)


@dataclass
class CheckpointConfig(Settings):
    """What survives an interruption (docs/reliability.md).

    Args:
        save_every: Iterations between checkpoints; one is also saved at a signal. 0: only that.
        save_final: Save one after the last iteration, too, from which the run can be lengthened.
        keep: Newest checkpoints that stay.
        best: Metric by which the best checkpoint stays as well, mean over the agents, larger is better; null for none.
    """

    save_every: int = 10
    save_final: bool = False
    keep: int = 2
    best: str | None = None

    def __post_init__(self) -> None:
        expect(self.save_every >= 0, "checkpoint.save_every", "0 (at signals only) or more iterations", self.save_every)
        expect(self.keep >= 1, "checkpoint.keep", "at least 1", self.keep)


@dataclass
class GuardsConfig(Settings):
    """What is watched while a run trains.

    Args:
        on_nonfinite: A loss or gradient that is not finite never reaches the weights. `stop`: the run ends, its last
            good state saved; `skip`: that optimizer step is left out.
        kl_bound: KL, in nats per response, above which an iteration is flagged.
        stop_at_kl: KL above which the run ends early, its agents saved; null for never.
    """

    on_nonfinite: Literal["stop", "skip"] = "stop"
    kl_bound: float = 50.0
    stop_at_kl: float | None = None

    def __post_init__(self) -> None:
        _positive("guards", self, "kl_bound", "stop_at_kl")


@dataclass
class Config(Settings):
    """One run.

    Args:
        seed: Every random choice of the run derives from it.
        iterations: Iterations of Algorithm 1, each on one batch of queries.
        output: Folder of the run; must not hold a run yet. null: the first free one of runs/NAME, runs/NAME-2, ...
        device: auto (a GPU where there is one), cpu, cuda or cuda:N.
        precision: fp32 (with TF32 matrix products on GPUs that have them), or bf16: autocast; weights keep their type.
        resume: Continue a run: the folder of a run or of one of its checkpoints, whose settings are then read from it;
            or `auto`: the newest run with these settings, and without one a new run. null: a new run.
        tracker: Where metrics go besides the run's folder. wandb works offline where no account is set up.
        sample_every: Iterations between sample texts in samples.jsonl; 0 for none.
        model: The policy.
        lora: Adapters instead of full fine-tuning.
        cory: The method.
        ppo: Each agent's PPO.
        sampling: How responses are sampled.
        checkpoint: What survives an interruption.
        guards: What is watched.
    """

    seed: int = 0
    iterations: int = 100
    output: str | None = None
    resume: str | None = None
    device: str = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    tracker: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    sample_every: int = 10
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    cory: CoryConfig = field(default_factory=CoryConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)

    def __post_init__(self) -> None:
        expect(0 <= self.seed < 2**32, "seed", "a whole number from 0 to 2**32 - 1", self.seed)
        expect(self.iterations >= 1, "iterations", "at least 1", self.iterations)
        bits = self.model.quantization
        expect(bits == "none" or self.lora.rank > 0, "model.quantization", f"lora.rank above 0 with {bits}", 0)
        if bits != "none" and self.lora.merge:
            raise UserError("lora.merge: expected false with model.quantization: rounded weights cannot be merged")
        expect(self.sample_every >= 0, "sample_every", "0 (none) or more iterations", self.sample_every)

    def resolve(self, name: str) -> str:
        """The folder that a model's name stands for: itself, unless the task has built-in models (`tiny`)."""
        return name


def keys(config_class: type, prefix: str = "") -> list[str]:
    """Every key of a configuration, dotted: `seed`, `ppo.batch_size`, ..."""
    found = []
    for name, kind in get_type_hints(config_class).items():
        nested = isinstance(kind, type) and issubclass(kind, Settings)
        found += keys(kind, f"{prefix}{name}.") if nested else [prefix + name]
    return found
