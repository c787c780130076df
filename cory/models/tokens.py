"""Responses token by token: their texts, and how much likelier than the reference the policy finds them."""

from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

DIGITS = 3  # of log-ratios, in nats


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> list[str]:
    """The text of each token, special tokens included. A character of several tokens stands at its last one."""
    if not tokenizer.is_fast:
        return tokenizer.batch_decode([[i] for i in ids.tolist()])
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer.backend_tokenizer, i) or "" for i in ids.tolist()]


def rounded(log_ratios: torch.Tensor) -> list[float]:
    """Log-ratios as they are stored."""
    return [round(ratio, DIGITS) for ratio in log_ratios.tolist()]


def token_record(
    tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, kl: float, log_ratios: torch.Tensor
) -> dict[str, Any]:
    """What is stored of a response for reading.

    Args:
        ids: (tokens,). kl: to the reference, in nats. log_ratios: (at least tokens,), log(pi /
            pi_0) of each token.
    """
    return {
        "kl": kl,
        "token_texts": token_texts(tokenizer, ids),
        "log_ratios": rounded(log_ratios[: len(ids)]),
    }
