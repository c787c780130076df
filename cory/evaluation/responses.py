"""Answers to prompts, with their KL to a base."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.config import SamplingConfig, UserError
from cory.metrics import full_kl
from cory.policies import window
from cory.policies.sampling import check_lengths, context_length, encode, pad_token, plain_text, sample, seed_everything


@dataclass
class Responses:
    """Answers to prompts: texts, KL to the base in nats per response, lengths in tokens with the end token."""

    completions: list[str]
    kl: list[float]
    tokens: list[int]


@torch.no_grad()
def respond(
    model: PreTrainedModel,
    base: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    sampling: SamplingConfig,
    batch_size: int = 64,
    seed: int = 0,
    chat_template: bool = False,
) -> Responses:
    """Samples one response of at most `sampling.max_new_tokens` tokens per prompt.

    Batches hold prompts of similar length; the random stream depends on `seed` alone. KL is to `base`, or where that is
    None to the model with its adapters off, under the same prompt. Raises a UserError where a prompt is too long for
    the model, or model and base differ in their vocabulary.
    """
    if base is not None and model.config.vocab_size != base.config.vocab_size:
        raise UserError(
            f"expected a model with the base's vocabulary of {base.config.vocab_size}, for a KL between them, "
            f"got {model.config.vocab_size} in {model.name_or_path!r}"
        )
    queries = [torch.tensor(ids, dtype=torch.long) for ids in encode(tokenizer, prompts, chat_template)]
    check_lengths([len(query) for query in queries], sampling.max_new_tokens, context_length(model), list(prompts))
    model.eval()
    seed_everything(seed)
    result = Responses([""] * len(queries), [0.0] * len(queries), [0] * len(queries))
    order = sorted(range(len(queries)), key=lambda i: len(queries[i]))
    for start in range(0, len(order), batch_size):
        index = order[start : start + batch_size]
        chosen = [queries[i].to(model.device) for i in index]
        responses = sample(model, tokenizer, chosen, sampling, sampling.max_new_tokens)
        packed = window.pack(chosen, responses, pad_token(tokenizer))
        width = packed.response_ids.shape[1]
        logits = window.forward(model, *packed[:3], width)[0].float()
        with model.disable_adapter() if base is None else nullcontext():
            base_logits = window.forward(base or model, *packed[:3], width)[0].float()
        kls = full_kl(logits, base_logits, packed.response_mask).tolist()
        for i, response, kl in zip(index, responses, kls, strict=True):
            result.completions[i] = plain_text(tokenizer, response, sampling.stop)
            result.kl[i], result.tokens[i] = kl, len(response)
    return result
