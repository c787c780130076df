"""Tiny random models of any family, and rows of token ids."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

IDS = {
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
NARROW = IDS | {"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 96}
SIZE = NARROW | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}


def tiny(name, **settings):
    """Returns a random model of a family."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split(" ")[0], **settings)
    return AutoModelForCausalLM.from_config(config).eval()


def rows(tokenizer, texts):
    """Returns the token ids of each text."""
    return [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
