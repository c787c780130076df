"""Loads policies, the shared reference, classifiers and tokenizers, from the Hub or from local folders."""

import importlib.util
import pickle
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from peft import PeftConfig, PeftModel
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.activations import GELUTanh, NewGELUActivation
from transformers.utils import logging
from transformers.utils.quantization_config import BitsAndBytesConfig

from cory.config import Config, ModelConfig
from cory.errors import UserError
from cory.identity import is_adapter, is_local
from cory.models import AVAILABLE
from cory.models.families import check_model
from cory.parallel.devices import configure

# Exceptions that libraries raise if a model is missing or damaged, or if its weights are pickled.
LOADING: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
)
LOADING += (RuntimeError, ImportError, SafetensorError, pickle.UnpicklingError)
HUB_TIMEOUT = 5  # seconds to wait for the Hub
NAMED = 5  # tensors named in an error; the others are counted


def find(name: str, key: str, revision: str | None = None) -> dict[str, Any]:
    """Returns from_pretrained's arguments for a model's source: a folder, the Hub, or the cache if the Hub fails.

    Args:
        name: Hub id or local folder.
        key: the setting that names the model, for messages.
        revision: revision of a model on the Hub.

    Raises a UserError if the folder does not exist, if a revision is given for a folder, or if the Hub fails and the
    model is not cached.
    """
    if Path(name).exists():
        if revision is not None:
            raise UserError(
                f"model.revision: expected null for the local folder {name!r}, got {revision!r}"
            )
        return {"local_files_only": True}
    if is_local(name):
        raise UserError(f"{key}: expected a Hub id or an existing local folder, got {name!r}")
    try:
        HfApi().repo_info(name, revision=revision, timeout=HUB_TIMEOUT)
    except Exception as error:  # its type depends on huggingface_hub's version and HTTP library
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return {"local_files_only": True, "revision": revision}
        at_revision = f" at revision {revision!r}" if revision else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{key}: expected a local folder or a model on the Hub, got {name!r}{at_revision} ({reason})"
        ) from None
    return {"revision": revision}


def load_tokenizer(
    name: str, where: dict[str, Any], key: str = "model.name"
) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer. If it has no pad token, it pads with its end token, as padding is always masked.

    Args:
        name: Hub id or local folder.
        where: see `find`.
        key: the setting that names the model, for messages.

    Raises a UserError if the tokenizer is missing or unreadable.
    """
    expected = f"{key}: expected a model with its tokenizer, got {name!r}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **where)
    except LOADING as error:
        raise UserError(
            f"{expected}, whose tokenizer is missing or cannot be read ({first_line(error)})"
        ) from None
    # If the files are missing, transformers makes up a tokenizer with only special tokens. It encodes
    # any text to nothing.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(f"{expected}, which has no tokenizer files. Save the tokenizer there, too")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(
    model: ModelConfig, device: torch.device | None = None, merge: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model and its tokenizer, on the CPU unless quantized.

    For a PEFT folder, loads the base model and merges the adapter into it. The KL reference then includes the adapter.

    Args:
        model: settings of the model.
        device: device of quantized weights; None: the CPU.
        merge: whether to merge an adapter. Merging into a quantized base rounds weights; an unmerged adapter is exact.

    Raises:
        UserError: the model or its tokenizer is missing or incomplete. The model is not a causal language model, or has
            too few embeddings for its tokenizer. An adapter is incomplete, or its base is missing or does not fit.
            Quantization is not available.
    """
    where = find(model.name, "model.name", model.revision)
    if is_adapter(Path(model.name)):
        base_name, revision = base_of(Path(model.name))
        base, tokenizer = load_policy(replace(model, name=base_name, revision=revision), device)
        # Includes both names of tied weights, because an adapter may untie them.
        weights = base.named_parameters(remove_duplicate=False)
        trainable = {name for name, weight in weights if weight.requires_grad}
        policy = attach(base, Path(model.name))
        tokenizer = adapter_tokenizer(Path(model.name), base, tokenizer)
        if not merge:
            return policy, tokenizer
        merged = policy.merge_and_unload()
        for name, weight in merged.named_parameters():  # PEFT froze the base's parameters
            weight.requires_grad_(name in trainable)
        return merged, tokenizer
    options = {"dtype": model.dtype, **quantization(model, device or torch.device("cpu"))}
    policy, tokenizer = load_model(
        AutoModelForCausalLM, "a causal language model", model.name, "model.name", options, where
    )
    # Given an adapter on the Hub, transformers loads its base, too, and freezes it.
    if getattr(policy, "_hf_peft_config_loaded", False):
        raise UserError(
            f"model.name: expected a whole model, or the local folder of an adapter, got {model.name!r}, "
            "which is an adapter on the Hub"
        )
    for module in list(policy.modules()):
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Policies are trained in eval(). In that mode, bitsandbytes would pack 4-bit weights for a
            # CPU kernel without a backward pass.
            module.support_avx512bf16_for_cpu = False
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                # One kernel replaces transformers' eight, which take half the time of a small model's update.
                setattr(module, name, GELUTanh())
    return policy, tokenizer


def load_model(
    auto_class: type[AutoModelForCausalLM | AutoModelForSequenceClassification],
    kind: str,
    name: str,
    key: str,
    options: dict[str, Any],
    where: dict[str, Any],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model and its tokenizer, and checks that all weights were saved.

    Args:
        auto_class: transformers' class for this kind of model.
        kind: kind of model, for messages.
        name: Hub id or local folder.
        key: the setting that names the model, for messages.
        options: options of the model's from_pretrained.
        where: see `find`.

    Raises a UserError if the model is of another kind, or if weights are missing or have the wrong shape. Also raises
    one if the tokenizer is missing or has more ids than the model has embeddings.
    """
    try:
        with quiet():
            model, report = auto_class.from_pretrained(
                name,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with the tensors' names
                trust_remote_code=False,  # without this, transformers would ask at the terminal
                **options,
                **where,
            )
    except LOADING as error:
        raise UserError(f"{key}: expected {kind}, got {name!r} ({first_line(error)})") from None
    check_complete(model, report, key, name)
    tokenizer = load_tokenizer(name, where, key)
    check_vocabulary(model, tokenizer, key, name)
    return model, tokenizer


def check_complete(model: PreTrainedModel, report: dict[str, Any], key: str, name: str) -> None:
    """Raises a UserError if weights are missing or do not fit; transformers would initialize these at random.

    Args:
        report: from_pretrained's loading info. Tied weights and buffers that need not be saved do not count as
            missing.
    """
    expected = f"{key}: expected all weights of a {type(model).__name__} in {name!r}"
    if report["missing_keys"]:
        raise UserError(f"{expected}, got none for {listed(report['missing_keys'])}")
    shapes = [
        f"{weight} {tuple(saved)}, not {tuple(wanted)}"
        for weight, saved, wanted in report["mismatched_keys"]
    ]
    if shapes:
        raise UserError(f"{expected}, got shapes that differ from config.json's: {listed(shapes)}")


def listed(names: Collection[str]) -> str:
    """Returns the first few names in alphabetical order, and the number of others."""
    first = ", ".join(sorted(names)[:NAMED])
    return first if len(names) <= NAMED else f"{first} and {len(names) - NAMED} more"


@contextmanager
def quiet() -> Iterator[None]:
    """Disables transformers' progress bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def attach(base: PreTrainedModel, folder: Path) -> PeftModel:
    """Returns `base` with a saved adapter.

    Raises a UserError if the adapter is damaged or incomplete, does not fit, adapts tied weights or changes no weights.
    """
    expected = f"model.name: expected an adapter that fits its base {base.name_or_path!r}, got {str(folder)!r}"
    try:
        # Load to the CPU; by default, PEFT would use the first GPU, whatever the base's device.
        model = PeftModel.from_pretrained(base, str(folder), torch_device="cpu")
        # PEFT only warns of missing weights and ignores superfluous ones. A second load reports both.
        mapping = getattr(base, "_checkpoint_conversion_mapping", None)
        report = model.load_adapter(str(folder), "default", torch_device="cpu", key_mapping=mapping)
    except KeyError as error:  # a module that is saved whole (modules_to_save) is missing
        raise UserError(f"{expected}, which lacks {error}") from None
    except LOADING as error:
        raise UserError(f"{expected} ({first_line(error)})") from None
    if model.active_peft_config.is_prompt_learning:
        raise UserError(
            f"{expected}, which learns a prompt and changes no weights. Use a LoRA adapter"
        )
    tied = tied_targets(model)
    if tied:
        raise UserError(
            f"{expected}, whose modules {tied} share their weights with others. Merge the adapter into a copy of its "
            "base that was saved with a separate output layer (tie_word_embeddings: false)"
        )
    missing = _lora_tensors(report.missing_keys)
    if missing:
        raise UserError(f"{expected}, which lacks {listed(missing)}")
    superfluous = _lora_tensors(report.unexpected_keys)
    if superfluous:
        raise UserError(
            f"{expected}, which has tensors for modules that the base lacks: {listed(superfluous)}"
        )
    return model


def tied_targets(model: PeftModel) -> list[str]:
    """Returns the adapted modules that share their weights with others, such as a head tied to the embedding.

    Merging an adapter into tied weights would also change the other module.
    """
    modules = list(model.get_base_model().named_modules())
    owners = Counter(id(weight) for _, module in modules for weight in module.parameters(False))
    return [
        name
        for name, module in modules
        if isinstance(module, BaseTunerLayer)
        and not isinstance(module, TrainableTokensLayer)  # PEFT puts it on both tied modules
        and any(owners[id(weight)] > 1 for weight in module.get_base_layer().parameters(False))
    ]


def _lora_tensors(names: Collection[str]) -> list[str]:
    """Returns the names of the LoRA tensors as an adapter's file has them."""
    return [name.replace(".default", "") for name in names if ".lora_" in name]


def base_of(folder: Path) -> tuple[str, str | None]:
    """Returns a saved adapter's base model, and the base's revision if given.

    Raises a UserError if the adapter's configuration is damaged, or names no base.
    """
    try:
        adapter = PeftConfig.from_pretrained(str(folder))
    except LOADING as error:
        raise UserError(
            f"model.name: expected an adapter, got {str(folder)!r} ({first_line(error)})"
        ) from None
    name = adapter.base_model_name_or_path
    if not name:
        raise UserError(
            f"model.name: expected an adapter whose adapter_config.json names its base, got {str(folder)!r}"
        )
    return name, adapter.revision


def adapter_tokenizer(
    folder: Path, policy: PreTrainedModel | PeftModel, default: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer saved with an adapter of `policy`, else `default`.

    Raises a UserError if the policy lacks an embedding for one of the tokenizer's ids.
    """
    if not (folder / "tokenizer_config.json").exists():
        return default
    tokenizer = load_tokenizer(str(folder), {})
    check_vocabulary(policy, tokenizer, "model.name", str(folder))
    return tokenizer


def load_answering(
    model: ModelConfig, device: torch.device, merge: bool = False
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """Loads a model that only answers, and its tokenizer.

    Args:
        merge: see `load_policy`. Pass True if another adapter will be added to the model.

    Raises a UserError if the model cannot be loaded, or if padding changes its outputs.
    """
    configure(device)
    policy, tokenizer = load_policy(model, device, merge=merge)
    policy = policy.to(device).eval()
    check_model(policy, tokenizer)
    return policy, tokenizer


def quantization(model: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Returns from_pretrained arguments for 4-bit weights on `device`. Raises a UserError without bitsandbytes."""
    if model.quantization == "none":
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "model.quantization: expected bitsandbytes for 4bit, got no such package. Install it with "
            "pip install -e '.[quantization]'"
        )
    for available in AVAILABLE:
        available.cache_clear()
    compute = torch.float32 if model.dtype == "float32" else torch.bfloat16
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def check_vocabulary(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, key: str, name: str
) -> None:
    """Raises a UserError if the tokenizer has ids without an embedding in the model."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        expected = f"a tokenizer with ids below {rows}, the number of the model's embeddings"
        raise UserError(f"{key}: expected {expected}, got ids up to {largest} in {name!r}")


def first_line(error: Exception) -> str:
    """Returns an error's first line. If it is a heading, as in load_state_dict's errors, appends the next line."""
    if isinstance(error, SafetensorError):
        return f"a damaged safetensors file: {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def tokenizer_of(config: Config) -> PreTrainedTokenizerBase:
    """Returns the first agent's tokenizer, which measures the lengths of queries."""
    model = config.of_agent(0).model
    policy = config.resolve(model.name)
    return load_tokenizer(policy, find(policy, "model.name", model.revision))
