"""Loads policies, the shared reference, classifiers and tokenizers, from the Hub or from local folders."""

import copy
import importlib.util
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cory import processes
from cory.adapters import add_adapter
from cory.agent import Agent
from cory.config import Config, ModelConfig, UserError
from cory.kernels import lean
from cory.sampling import seed_everything
from cory.trl_parts import PolicyWithValueHead

# What libraries raise over a model folder that is none, is damaged, or holds a pickle in place of weights.
LOADING: tuple[type[Exception], ...] = (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError)
LOADING += (RuntimeError, ImportError, SafetensorError, pickle.UnpicklingError)
HUB_TIMEOUT = 5  # seconds to wait for the Hub before saying that it cannot be reached


def choose_device(name: str) -> torch.device:
    """Sets the process's device before anything else touches accelerate, and returns it.

    Raises:
        UserError: the device is unknown or absent.
    """
    try:
        wanted = None if name == "auto" else torch.device(name)
    except RuntimeError:
        raise UserError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}") from None
    if wanted is not None and wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device: expected one that this machine has, got {name!r}, and it has {torch.cuda.device_count()} GPUs"
        )
    alone = wanted is None and not torch.accelerator.is_available()
    state = processes.start(cpu=alone or (wanted is not None and wanted.type == "cpu"))
    if wanted is not None and wanted.type != state.device.type:
        raise UserError(f"device: expected {state.device}, which this process uses already, got {name!r}")
    if wanted is not None and wanted.index is not None:
        state.device = wanted
    if state.device.type == "cpu":
        processes.settle()
    torch.set_float32_matmul_precision("high")  # TF32 matrix products on GPUs that have them; the CPU has none
    return state.device


def find(
    name: str, what: str, revision: str | None = None, kind: str = "model", cached: bool = False
) -> dict[str, Any]:
    """Where to load `name` from, as arguments of from_pretrained: tells a missing folder from an unreachable Hub.

    Args:
        what: the key that named it, for the message.
        kind: `model` or `dataset`.
        cached: whether it is known to be in the local cache, so that no Hub is needed; for models this is looked up.

    Raises:
        UserError: no such folder, no such repository, or no answer from the Hub within a few seconds.
    """
    if Path(name).exists():
        return {"local_files_only": True}
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{what}: expected a Hub id or an existing local folder, got {name!r}")
    advice = "Give a local folder, or run without --config for the embedded default, which needs no network."
    try:
        HfApi().repo_info(name, revision=revision, repo_type=kind, timeout=HUB_TIMEOUT)
    except GatedRepoError:
        raise UserError(f"{what}: {name!r} is gated. Accept its terms on the Hub, then run `hf auth login`.") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UserError(
            f"{what}: expected a local folder or a {kind} on the Hub, and {name!r} is neither. {advice}"
        ) from None
    except Exception as error:  # the HTTP library underneath, and so its errors, differs between versions
        in_cache = kind == "model" and isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
        if cached or in_cache:
            return {"local_files_only": True, "revision": revision}
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"{what}: the Hub cannot be reached to load {name!r} ({reason}). {advice}") from None
    return {"revision": revision}


def load_tokenizer(name: str, where: dict[str, Any], trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. One without a pad token pads with its end token: padding is masked everywhere."""
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **where)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(model: ModelConfig, merge: bool = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model and its tokenizer, on the CPU if not quantized; TRL's trainer moves it.

    A PEFT folder gives its base with the adapter merged in, so that the adapter is part of any reference made of it.

    Args:
        merge: off, the adapter is left beside its base: exact where the base is quantized, as merging rounds.

    Raises:
        UserError: the model is missing, is no causal language model, or has fewer embeddings than its tokenizer ids;
            the base of an adapter is missing or does not fit it; quantization is asked for and cannot be had.
    """
    where = find(model.name, "model.name", model.revision)
    if (Path(model.name) / "adapter_config.json").exists():
        return _load_adapter(model, where, merge)
    options = {"dtype": model.dtype, "trust_remote_code": model.trust_remote_code, **quantization(model)}
    try:
        tokenizer = load_tokenizer(model.name, where, model.trust_remote_code)
        policy = AutoModelForCausalLM.from_pretrained(model.name, **options, **where)
    except LOADING as error:
        reason = _first_line(error)
        raise UserError(f"model.name: expected a causal language model, got {model.name!r} ({reason})") from None
    for module in policy.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes packs 4 bit weights in eval() for a CPU kernel without a backward pass; TRL trains in eval().
            module.support_avx512bf16_for_cpu = False
    check_vocabulary(policy, tokenizer, "model.name", model.name)
    lean(policy)
    return policy, tokenizer


def _load_adapter(
    model: ModelConfig, where: dict[str, Any], merge: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    base_name = PeftConfig.from_pretrained(model.name).base_model_name_or_path
    base, tokenizer = load_policy(replace(model, name=base_name, revision=None))
    if (Path(model.name) / "tokenizer_config.json").exists():
        tokenizer = load_tokenizer(model.name, where)
    try:
        policy = PeftModel.from_pretrained(base, model.name)
        return policy.merge_and_unload() if merge else policy, tokenizer
    except LOADING as error:
        raise UserError(
            f"model.name: expected an adapter that fits its base {base_name!r}, got {model.name!r} "
            f"({_first_line(error)})"
        ) from None


def quantization(model: ModelConfig) -> dict[str, Any]:
    """Arguments of from_pretrained for 4 or 8 bit weights.

    Raises:
        UserError: bitsandbytes is not installed, or does not run on this device.
    """
    if model.quantization == "none":
        return {}
    device = PartialState().device
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"model.quantization: expected bitsandbytes to be installed for {model.quantization}, and it is not: "
            "pip install -e '.[quantization]'"
        )
    if device.type not in ("cuda", "cpu", "xpu"):
        raise UserError(f"model.quantization: expected a GPU or the CPU for {model.quantization}, got {device}")
    compute = torch.float32 if model.dtype == "float32" else torch.bfloat16
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": compute}
    settings = BitsAndBytesConfig(**(four if model.quantization == "4bit" else {"load_in_8bit": True}))
    return {"quantization_config": settings, "device_map": {"": device}}


def load_classifier(name: str, label: str, what: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, int]:
    """A sequence classifier, its tokenizer, and the index of `label` (upper or lower case alike).

    Raises:
        UserError: it is missing, is no classifier, or has no such label among at least two.
    """
    where = find(name, what)
    try:
        labels = AutoConfig.from_pretrained(name, **where).id2label
        tokenizer = load_tokenizer(name, where)
        index = [i for i, text in labels.items() if text.upper() == label.upper()]
        if len(labels) < 2 or not index:
            raise UserError(
                f"{what}: expected a classifier with the label {label} among two or more, got {labels} in {name!r}"
            )
        model = AutoModelForSequenceClassification.from_pretrained(name, dtype="float32", **where)
    except UserError:
        raise
    except LOADING as error:
        raise UserError(f"{what}: expected a sequence classifier, got {name!r} ({_first_line(error)})") from None
    check_vocabulary(model, tokenizer, what, name)
    return model.eval().requires_grad_(False), tokenizer, int(index[0])


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, what: str, name: str) -> None:
    """Raises a UserError where the tokenizer has ids that the model has no embedding for."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        raise UserError(
            f"{what}: expected a tokenizer of at most {rows} ids, the rows of the model's embedding, "
            f"got ids up to {largest} in {name!r}"
        )


def make_agents(config: Config, num_agents: int | None = None) -> list[Agent]:
    """The agents of a run, `agent_1`, `agent_2`, ...: equal copies of the policy, each with a value head of its own.

    Full fine-tuning: a copy of the weights for each, and one frozen reference for all. LoRA: an adapter for each, on
    one base or on copies of it (`lora.shared_base`), and no reference: that is the base with its adapters off.

    Args:
        num_agents: how many; default `config.cory.num_agents`.

    Raises:
        UserError: the device or the model cannot be had.
    """
    choose_device(config.device)
    if config.ppo.mini_batch_size % processes.count():
        raise UserError(
            f"ppo.mini_batch_size: expected a multiple of the number of processes, {processes.count()}, "
            f"got {config.ppo.mini_batch_size}"
        )
    kind = PartialState().distributed_type.value
    if kind in ("DEEPSPEED", "FSDP"):
        raise UserError(
            f"accelerate: expected plain data parallelism (configs/accelerate/), got {kind}: two agents in one process "
            "cannot share its engine. LoRA and gradient checkpointing save memory instead."
        )
    num_agents = config.cory.num_agents if num_agents is None else num_agents
    pi_0, tokenizer = load_policy(config.model)
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
        policies = [pi_0] + [load_policy(config.model)[0] for _ in range(num_agents - 1)]
    agents: list[Agent] = []
    for index, policy in enumerate(policies):
        name = f"agent_{index + 1}"
        seed_everything(config.seed, index)  # draws the value head, and the adapter where there is one
        if config.lora.rank:
            base = agents[0].ppo.policy if agents and config.lora.shared_base else policy
            policy = add_adapter(base, name, config.lora)
            policy.peft_config[name].base_model_name_or_path = config.model.name
        with_value = PolicyWithValueHead(policy)
        if config.ppo.value_head_init == "zeros":
            for parameter in with_value.v_head.parameters():
                torch.nn.init.zeros_(parameter)
        agents.append(Agent(name, with_value, reference, tokenizer, config))
    return agents


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
