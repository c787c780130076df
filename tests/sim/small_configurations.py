"""The files of configs/imdb and configs/gsm8k, and the architectures of the models that they name, at small width."""

from pathlib import Path

from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from cory.cli.load import load
from cory.config import Config
from gsm8k_train.config import Gsm8kConfig
from imdb_train.config import ImdbConfig

ROOT = Path(__file__).resolve().parents[2]
KINDS: dict[str, type[Config]] = {"imdb": ImdbConfig, "gsm8k": Gsm8kConfig}
FILES = sorted(path for kind in KINDS for path in (ROOT / "configs" / kind).glob("*.yaml"))
# Of each model its class, and as many query heads for each key as it has; GPT-2 has one.
MODELS: dict[str, tuple[type[PreTrainedConfig], int]] = {
    "openai-community/gpt2": (GPT2Config, 1),
    "openai-community/gpt2-large": (GPT2Config, 1),
    "openai-community/gpt2-xl": (GPT2Config, 1),
    "meta-llama/Llama-2-7b-chat-hf": (LlamaConfig, 1),
    "meta-llama/Llama-2-13b-chat-hf": (LlamaConfig, 1),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (LlamaConfig, 3),
    "Qwen/Qwen2.5-0.5B-Instruct": (Qwen2Config, 7),
    "Qwen/Qwen3-0.6B": (Qwen3Config, 2),
}
TIED = ("SmolLM2", "Qwen")  # the output layer is the embedding; GPT-2's always is


def read(file: Path) -> Config:
    """The settings of a file."""
    return load(KINDS[file.parent.name], None, ["--config", str(file)])


def small(name: str, vocabulary: int) -> PreTrainedConfig:
    """The architecture of a model with two layers, narrow, and of another vocabulary."""
    architecture, group = MODELS[name]
    tokens = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    if architecture is GPT2Config:
        return GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=2048, **tokens)
    keys = 1 if group > 1 else 4
    heads = group * keys
    return architecture(
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=8,
        hidden_size=8 * heads,
        intermediate_size=24 * heads,
        max_position_embeddings=2048,
        tie_word_embeddings=any(family in name for family in TIED),
        **tokens,
    )
