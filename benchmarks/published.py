"""The published configurations of the models that configs/ names: their sizes, without a hub.

Of each only what decides its architecture, its sizes and its parameters, from the file config.json
of https://huggingface.co/NAME. tests/test_configurations.py compares the parameters with the
numbers that the models' pages state.
"""

from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)


def gpt2(width: int, layers: int, heads: int) -> GPT2Config:
    """A GPT-2 (Radford et al., 2019, Table 2)."""
    return GPT2Config(n_embd=width, n_layer=layers, n_head=heads)


def llama2(width: int, inner: int, layers: int, heads: int) -> LlamaConfig:
    """A Llama 2 of 7 or 13 billion parameters (Touvron et al., 2023)."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=4096,
    )


PUBLISHED: dict[str, PreTrainedConfig] = {
    "openai-community/gpt2": gpt2(768, 12, 12),
    "openai-community/gpt2-large": gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": gpt2(1600, 48, 25),
    "meta-llama/Llama-2-7b-chat-hf": llama2(4096, 11008, 32, 32),
    "meta-llama/Llama-2-13b-chat-hf": llama2(5120, 13824, 40, 40),
    "HuggingFaceTB/SmolLM2-135M-Instruct": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-0.6B": Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
}


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without weights."""
    import torch

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
