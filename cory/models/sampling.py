"""Sampling responses: from token ids to token ids, in one batch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.config import SamplingConfig
from cory.models.by_generate import keeps_keys_and_values, sample_by_generate
from cory.models.drawing import Stopping, draw, warpers
from cory.models.texts import Texts, padded, unread, with_stems_read
from cory.models.tokenization import end_tokens, pad_token
from cory.models.window import read_stems
from cory.parallel.devices import to_device
from cory.parallel.sharding import device_of


class Sampled(NamedTuple):
    """A response to each query, as 1-d token ids on the CPU; and of each its tokens' logits (vocabulary), as they were
    before warping, or none.
    """

    responses: list[torch.Tensor]
    logits: list[list[torch.Tensor]]


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    queries: Sequence[torch.Tensor],
    settings: SamplingConfig,
    max_new_tokens: int,
    generator: torch.Generator,
    ends: Sequence[int] | None = None,
    keep_logits: bool = False,
) -> Sampled:
    """Samples one response per query, all in one batch. The model must be in `eval()`.

    Draws what `model.generate` would, with less work: what prompts have in common is read once, and
    rows that have ended leave the batch. That changes logits in their last bits. A model that
    remembers more than keys and values, such as Mamba, is run by `generate`, which knows its cache;
    the tokens are drawn here all the same.

    The program waits for the device once per token, to learn which responses have ended.

    Args:
        queries: 1-d tensors of token ids on the CPU.
        max_new_tokens: after which a response ends, if it has not ended with its first end token, or with the token
            that completes its first stop text (`settings.stop`).
        generator: of all random numbers (`cory/streams.py`).
        ends: the end tokens; by default the model's and the tokenizer's.
        keep_logits: whether the logits are returned.
    """
    prompts = [tuple(query.tolist()) for query in queries]
    ends = end_tokens(model, tokenizer) if ends is None else ends
    stopping = Stopping(tokenizer, ends, settings.stop)
    warp = warpers(settings)
    if not keeps_keys_and_values(model):
        ids, mask = padded(prompts, pad_token(tokenizer), device_of(model))
        sampled = sample_by_generate(
            model, ids, mask, max_new_tokens, warp, generator, stopping, keep_logits
        )
        return Sampled(*sampled)

    texts, logits = _read_prompts(model, prompts, pad_token(tokenizer))
    responses: list[list[int]] = [[] for _ in queries]
    kept_logits: list[list[torch.Tensor]] = [[] for _ in queries]
    unfinished = set(range(len(queries)))
    rows = list(range(len(queries)))  # the queries that are in the batch
    while True:
        if keep_logits:
            for row, row_logits in zip(rows, logits, strict=True):
                if row in unfinished:
                    kept_logits[row].append(row_logits)

        texts.append(draw(warp(texts.ids, logits.float()).softmax(-1), generator))

        for row, token in zip(rows, texts.new[:, 0].tolist(), strict=True):
            if row not in unfinished:
                continue
            responses[row].append(token)
            if len(responses[row]) == max_new_tokens or stopping.has_ended(responses[row]):
                unfinished.remove(row)
        if not unfinished:
            return Sampled([torch.tensor(response) for response in responses], kept_logits)
        if len(unfinished) <= len(rows) * 7 / 8:  # fewer are not worth the copy of the cache
            kept = [index for index, row in enumerate(rows) if row in unfinished]
            rows = [rows[index] for index in kept]
            texts.select(kept)
        logits = texts.read()


def _read_prompts(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], pad: int
) -> tuple[Texts, torch.Tensor]:
    """Reads prompts, each one that several rows share once, and what they begin with in common, too (`read_stems`).

    Returns texts with a row for each prompt, and the logits after it, (prompts, vocabulary).
    """
    row_of_prompt = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    distinct = list(row_of_prompt)
    ids, mask = padded(distinct, pad, device_of(model))
    begun = read_stems(model, distinct, pad)
    if begun is None:
        texts = unread(model, ids, mask, [len(prompt) < ids.shape[1] for prompt in distinct])
    else:
        texts = with_stems_read(model, begun, ids)
    logits = texts.read()
    if len(distinct) < len(prompts):
        copies = [row_of_prompt[prompt] for prompt in prompts]
        texts.select(copies)
        logits = logits[to_device(torch.tensor(copies), logits.device)]
    return texts, logits
