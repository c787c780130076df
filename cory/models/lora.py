"""LoRA agents: adapters `agent_1`, `agent_2`, ... on one base model, which is the reference with adapters off."""

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeAlias

import peft
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cory.config import LoraConfig
from cory.errors import UserError
from cory.models.load import quiet, tied_targets
from cory.parallel.distributed import is_main
from cory.parallel.sharding import is_sharded, whole_weights

LanguageModel: TypeAlias = PreTrainedModel | PeftModel  # without or with adapters


def add_adapter(base: LanguageModel, name: str, lora: LoraConfig) -> PeftModel:
    """Returns `base` with a new trainable adapter, which becomes active; everything else is frozen.

    Raises a UserError if a name in `lora.target_modules` matches no module, if PEFT does not accept a module, or if a
    module shares its weights with another.
    """
    model = base.get_base_model() if isinstance(base, PeftModel) else base
    available = sorted(
        {
            n.rsplit(".", 1)[-1]
            for n, m in model.named_modules()
            if isinstance(m, (nn.Linear, Conv1D))
        }
    )
    targets = lora.target_modules
    if targets is None:
        default_targets = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        targets = default_targets.get(model.config.model_type, "all-linear")
    else:
        missing = [
            t
            for t in targets
            if not any(n == t or n.endswith(f".{t}") for n, _ in model.named_modules())
        ]
        if missing:
            raise UserError(
                f"lora.target_modules: expected modules of the model, among {available}, got {missing}"
            )
    conv = any(isinstance(module, Conv1D) for module in model.modules())  # GPT-2's layers
    # LoRA dropout keeps PEFT's default, 0: as in TRL, dropout is off in all passes.
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        fan_in_fan_out=conv,
        task_type="CAUSAL_LM",
    )
    try:
        if isinstance(base, PeftModel):
            base.add_adapter(name, config)
        else:
            base = peft.get_peft_model(base, config, adapter_name=name)
    except ValueError as error:
        # For example Mamba's output projection, whose kernel bypasses the adapter.
        raise UserError(
            f"lora.target_modules: expected modules that take an adapter, among {available} ({error})"
        ) from None
    tied = tied_targets(base)
    if tied:
        raise UserError(
            f"lora.target_modules: expected modules that do not share their weights, got {tied}. Leave these out, or "
            "start from a copy of the model that was saved with a separate output layer (tie_word_embeddings: false)"
        )
    base.set_adapter(name)
    return base


def activate(policy: LanguageModel, name: str) -> None:
    """Activates an adapter, if the policy has adapters."""
    if isinstance(policy, PeftModel):
        policy.set_adapter(name)


def without_adapters(policy: LanguageModel) -> AbstractContextManager[None]:
    """Returns a context that disables all of the policy's adapters."""
    return policy.disable_adapter() if isinstance(policy, PeftModel) else nullcontext()


def save_policy(policy: LanguageModel, folder: Path, adapter: str | None) -> None:
    """Saves one adapter of a policy as a PEFT folder, or the full model as a Hugging Face folder.

    The full model, without adapters, is saved if `adapter` is None or the policy has no adapters. The policy in memory
    is unchanged. Only the main process writes, but all processes must call this if the policy is sharded.
    """
    if isinstance(policy, PeftModel) and adapter is not None:
        _save_adapter(policy, folder, adapter)
    else:
        _save_model(policy, folder)


def _save_adapter(policy: PeftModel, folder: Path, name: str) -> None:
    """Writes an adapter; PEFT's save_pretrained would use a subfolder and add a model card."""
    weights = whole_weights(policy, "lora_") if is_sharded(policy) else None
    if not is_main():
        return
    folder.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(
        policy,
        state_dict=weights,
        adapter_name=name,
        save_embedding_layers=False,  # they are not trained; by default, PEFT asks the Hub about them
    )
    weights = {key: value.contiguous() for key, value in weights.items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(policy.peft_config[name])
    config.inference_mode = True
    config.save_pretrained(folder)


def _save_model(policy: LanguageModel, folder: Path) -> None:
    """Writes a full model, without adapters."""
    base = policy.get_base_model() if isinstance(policy, PeftModel) else policy
    weights = whole_weights(base) if is_sharded(policy) else base.state_dict()
    if not is_main():
        return
    weights = {
        key.replace(".base_layer.", "."): value
        for key, value in weights.items()
        if ".lora_" not in key
    }
    # With a quantizer, transformers ignores the given `state_dict` and saves the model's own weights.
    quantizer = getattr(base, "hf_quantizer", None)
    base.hf_quantizer = None
    try:
        with quiet():
            base.save_pretrained(folder, state_dict=weights)
    finally:
        base.hf_quantizer = quantizer
