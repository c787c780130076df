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
from cory.identity import is_local
from cory.models import AVAILABLE
from cory.models.families import check_model
from cory.parallel.devices import configure

# What libraries raise for a folder without a model, a damaged one, or one with pickled weights.
LOADING: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
)
LOADING += (RuntimeError, ImportError, SafetensorError, pickle.UnpicklingError)
HUB_TIMEOUT = 5  # seconds to wait for the Hub before saying that it cannot be reached
NAMED = 5  # tensors that an error names; it counts the others


def find(name: str, what: str, revision: str | None = None) -> dict[str, Any]:
    """Where to load a model from, as from_pretrained arguments. What is in the local cache needs no Hub.

    Args:
        what: the key that named it, for the message.

    Raises a UserError: no such folder, a folder with a revision, or the Hub refuses or does not answer within seconds.
    """
    if Path(name).exists():
        if revision is not None:
            raise UserError(
                f"model.revision: expected null for the local folder {name!r}, got {revision!r}"
            )
        return {"local_files_only": True}
    if is_local(name):
        raise UserError(f"{what}: expected a Hub id or an existing local folder, got {name!r}")
    try:
        HfApi().repo_info(name, revision=revision, timeout=HUB_TIMEOUT)
    except Exception as error:  # as of the HTTP library underneath, which differs between versions
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return {"local_files_only": True, "revision": revision}
        at_revision = f" at revision {revision!r}" if revision else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{what}: expected a local folder or a model on the Hub, got {name!r}{at_revision} ({reason})"
        ) from None
    return {"revision": revision}


def load_tokenizer(
    name: str, where: dict[str, Any], what: str = "model.name"
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. One without a pad token pads with its end token: padding is masked
    everywhere.

    Args:
        what: the key that named the model, for the message.

    Raises a UserError: there is none, or it cannot be read.
    """
    expected = f"{what}: expected a model with its tokenizer, got {name!r}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **where)
    except LOADING as error:
        raise UserError(
            f"{expected}, whose tokenizer is missing or cannot be read ({first_line(error)})"
        ) from None
    # Where the files are missing, transformers makes up a tokenizer of special tokens alone, which
    # encodes any text as no token at all.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(f"{expected}, which has no tokenizer files: save the tokenizer there, too")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(
    model: ModelConfig, device: torch.device | None = None, merge: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model and its tokenizer, on the CPU if not quantized.

    A PEFT folder gives its base with the adapter merged in, so that the adapter is part of any
    reference made of it.

    Args:
        device: where quantized weights are put; None: the CPU.
        merge: False leaves the adapter unmerged, which is exact for a quantized base, where merging
            rounds.

    Raises:
        UserError: the model or its tokenizer is missing; it is not a causal language model, lacks
            weights, or has fewer embeddings than its tokenizer ids; an adapter lacks weights, or
            its base is missing or does not fit it; quantization is not available.
    """
    where = find(model.name, "model.name", model.revision)
    if (Path(model.name) / "adapter_config.json").exists():
        base_name, revision = base_of(Path(model.name))
        base, tokenizer = load_policy(replace(model, name=base_name, revision=revision), device)
        weights = base.named_parameters(remove_duplicate=False)  # a tied head may be saved whole
        trainable = {name for name, weight in weights if weight.requires_grad}
        policy = attach(base, Path(model.name))
        tokenizer = adapter_tokenizer(Path(model.name), base, tokenizer)
        if not merge:
            return policy, tokenizer
        merged = policy.merge_and_unload()
        for name, weight in merged.named_parameters():  # PEFT froze those of the base
            weight.requires_grad_(name in trainable)
        return merged, tokenizer
    options = {"dtype": model.dtype, **quantization(model, device or torch.device("cpu"))}
    policy, tokenizer = load_model(
        AutoModelForCausalLM, "a causal language model", model.name, "model.name", options, where
    )
    # Of an adapter on the Hub, transformers loads the base with it, and freezes it.
    if getattr(policy, "_hf_peft_config_loaded", False):
        raise UserError(
            f"model.name: expected a whole model, or the local folder of an adapter, got {model.name!r}, an adapter"
        )
    for module in list(policy.modules()):
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes packs 4 bit weights in eval() for a CPU kernel without a backward pass;
            # TRL trains in eval().
            module.support_avx512bf16_for_cpu = False
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                # In one kernel: transformers writes GPT-2's GELU as eight, half the time of a small
                # model's update.
                setattr(module, name, GELUTanh())
    return policy, tokenizer


def load_model(
    auto_class: type[AutoModelForCausalLM | AutoModelForSequenceClassification],
    kind: str,
    name: str,
    what: str,
    options: dict[str, Any],
    where: dict[str, Any],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model, all of whose weights were saved, and its tokenizer.

    Args:
        auto_class: transformers' class that loads it, one for each kind of model.
        kind: what it loads. what: the key that named the model. Both are for messages.
        options: of the model's from_pretrained. where: see `find`.

    Raises a UserError: it is no such model, weights are missing or of another shape, or it has no
    tokenizer, or fewer embeddings than that has ids.
    """
    try:
        with quiet():
            model, report = auto_class.from_pretrained(
                name,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with the names of the tensors
                trust_remote_code=False,  # without it, transformers asks at the terminal
                **options,
                **where,
            )
    except LOADING as error:
        raise UserError(f"{what}: expected {kind}, got {name!r} ({first_line(error)})") from None
    check_complete(model, report, what, name)
    tokenizer = load_tokenizer(name, where, what)
    check_vocabulary(model, tokenizer, what, name)
    return model, tokenizer


def check_complete(model: PreTrainedModel, report: dict[str, Any], what: str, name: str) -> None:
    """Raises a UserError that names the weights which transformers made up, as they were not saved
    or did not fit.

    Args:
        report: from_pretrained's loading info. A tensor that is tied to one which was saved is not
            missing there, nor is a buffer that is never saved.
    """
    expected = f"{what}: expected all weights of a {type(model).__name__} in {name!r}"
    if report["missing_keys"]:
        raise UserError(f"{expected}, got none for {listed(report['missing_keys'])}")
    shapes = [
        f"{key} {tuple(saved)}, not {tuple(wanted)}"
        for key, saved, wanted in report["mismatched_keys"]
    ]
    if shapes:
        raise UserError(f"{expected}, got other shapes than config.json has: {listed(shapes)}")


def listed(names: Collection[str]) -> str:
    """The first few names in alphabetical order, and how many more there are."""
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
    """`base` with a saved adapter on it. Raises a UserError if the adapter is damaged, incomplete, does not fit, is on
    tied weights, or changes no weights.
    """
    expected = f"model.name: expected an adapter that fits its base {base.name_or_path!r}, got {str(folder)!r}"
    try:
        # Read to the CPU: by itself PEFT would go through the first GPU, whichever the base is on.
        model = PeftModel.from_pretrained(base, str(folder), torch_device="cpu")
        # PEFT warns of missing weights and passes over superfluous ones. Loading them once more
        # reports both.
        mapping = getattr(base, "_checkpoint_conversion_mapping", None)
        report = model.load_adapter(str(folder), "default", torch_device="cpu", key_mapping=mapping)
    except KeyError as error:  # a module that is trained and saved whole, beside LoRA's
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
            f"{expected}, whose modules {tied} share their weights with others. Merge it into a copy of its base that "
            "is saved with an output layer of its own (tie_word_embeddings: false)"
        )
    missing = _lora_tensors(report.missing_keys)
    if missing:
        raise UserError(f"{expected}, which lacks {listed(missing)}")
    superfluous = _lora_tensors(report.unexpected_keys)
    if superfluous:
        raise UserError(
            f"{expected}, which has tensors without a place in the base: {listed(superfluous)}"
        )
    return model


def tied_targets(model: PeftModel) -> list[str]:
    """The modules with an adapter whose weights another module shares, as a head that is tied to the embedding.

    Merged into such weights an adapter changes the other module, too.
    """
    modules = list(model.get_base_model().named_modules())
    owners = Counter(id(weight) for _, module in modules for weight in module.parameters(False))
    return [
        name
        for name, module in modules
        if isinstance(module, BaseTunerLayer)
        and not isinstance(module, TrainableTokensLayer)  # PEFT has it on both
        and any(owners[id(weight)] > 1 for weight in module.get_base_layer().parameters(False))
    ]


def _lora_tensors(names: Collection[str]) -> list[str]:
    """LoRA's tensors among a model's, named as in the adapter's file, which is without the adapter's name."""
    return [name.replace(".default", "") for name in names if ".lora_" in name]


def base_of(folder: Path) -> tuple[str, str | None]:
    """The model that a saved adapter is for, and its revision if it has one.

    Raises a UserError if the adapter's configuration is damaged, or names no model.
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
    """The tokenizer saved with an adapter of `policy`, else its base's. Raises a UserError if the policy has no
    embedding for one of its ids.
    """
    if not (folder / "tokenizer_config.json").exists():
        return default
    tokenizer = load_tokenizer(str(folder), {})
    check_vocabulary(policy, tokenizer, "model.name", str(folder))
    return tokenizer


def load_answering(
    model: ModelConfig, device: torch.device, merge: bool = False
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """A model that only answers, and its tokenizer. `merge`: as in `load_policy`, before another adapter goes on it.

    Raises a UserError if it cannot be loaded, or if padding changes what it computes.
    """
    configure(device)
    policy, tokenizer = load_policy(model, device, merge=merge)
    policy = policy.to(device).eval()
    check_model(policy, tokenizer)
    return policy, tokenizer


def quantization(model: ModelConfig, device: torch.device) -> dict[str, Any]:
    """from_pretrained's arguments for 4 bit weights on `device`. Raises a UserError if bitsandbytes cannot run."""
    if model.quantization == "none":
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "model.quantization: expected bitsandbytes to be installed for 4bit, and it is not: "
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
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, what: str, name: str
) -> None:
    """Raises a UserError if the tokenizer has ids that the model has no embedding for."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        expected = f"a tokenizer of at most {rows} ids, the rows of the model's embedding"
        raise UserError(f"{what}: expected {expected}, got ids up to {largest} in {name!r}")


def first_line(error: Exception) -> str:
    """What an error says first; of one that has a list below a heading, as load_state_dict's, also the first item."""
    if isinstance(error, SafetensorError):
        return f"a damaged safetensors file: {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def tokenizer_of(config: Config) -> PreTrainedTokenizerBase:
    """The first agent's tokenizer, in whose tokens queries are measured."""
    model = config.of_agent(0).model
    policy = config.resolve(model.name)
    return load_tokenizer(policy, find(policy, "model.name", model.revision))
