"""Every shipped configuration is read, and its prompts, adapter and quantization are accepted."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from cory.command import load
from cory.config import Config, LoraConfig
from cory.models.load import quantization
from cory.models.lora import add_adapter
from cory.roles import RolePrompts
from gsm8k_train.config import Gsm8kConfig
from imdb_train.config import ImdbConfig

KINDS: dict[str, type[Config]] = {"imdb": ImdbConfig, "gsm8k": Gsm8kConfig}
FILES = sorted(path for kind in KINDS for path in (ROOT / "configs" / kind).glob("*.yaml"))
MODELS: dict[str, type[PreTrainedConfig]] = {
    "openai-community/gpt2": GPT2Config,
    "openai-community/gpt2-large": GPT2Config,
    "openai-community/gpt2-xl": GPT2Config,
    "meta-llama/Llama-2-7b-chat-hf": LlamaConfig,
    "meta-llama/Llama-2-13b-chat-hf": LlamaConfig,
    "HuggingFaceTB/SmolLM2-135M-Instruct": LlamaConfig,
    "Qwen/Qwen2.5-0.5B-Instruct": Qwen2Config,
    "Qwen/Qwen3-0.6B": Qwen3Config,
}


def read(file: Path) -> Config:
    """The settings of a file."""
    return load(KINDS[file.parent.name], None, ["--config", str(file)])


def small(name: str) -> PreTrainedModel:
    """The architecture of a model with two layers, narrow."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    return AutoModelForCausalLM.from_config(MODELS[name](vocab_size=320, **sizes, **heads))


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


files = pytest.mark.parametrize("file", FILES, ids=name_of)


@files
def test_model_prompts_adapters_and_quantization_are_accepted(file):
    config = read(file)
    assert config.model.name in (*MODELS, "tiny")

    # Each role reads the query, the observer also the response.
    prompts = RolePrompts(config.task.pioneer_prompt, config.task.observer_prompt)
    assert "Q1" in prompts.render(0, {"prompt": "Q1"}, None)
    observed = prompts.render(1, {"prompt": "Q1"}, ["R1"])
    assert "Q1" in observed and "R1" in observed

    if config.lora.rank:
        model = small(config.model.name)
        layers = model.config.num_hidden_layers
        adapted = add_adapter(model, "agent_1", LoraConfig(rank=config.lora.rank))
        weights = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
        assert all(any(f".{layer}." in name for name in weights) for layer in range(layers))

    if config.model.quantization != "none":
        pytest.importorskip("bitsandbytes")
        options = quantization(config.model, torch.device("cuda"))
        assert options["quantization_config"].load_in_4bit
        assert options["device_map"] == {"": torch.device("cuda")}
