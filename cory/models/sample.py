"""Samples responses in one batch, from token ids to token ids.

The loop in `sample` serves models that cache only keys and values. Other models, such as Mamba, run in transformers'
`generate`, which supports their caches. Both routes draw tokens in the same way.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import logits_process

from cory.config import SamplingConfig
from cory.models.prefixes import KeysAndValues, read_stems
from cory.models.text import end_tokens, pad_token, reader
from cory.models.window import accepted, pad, whole_mask
from cory.parallel.devices import to_device
from cory.parallel.sharding import device_of


class Sampled(NamedTuple):
    """Responses as 1-d token ids on the CPU and, if kept, the logits (vocabulary,) of each token before warping."""

    responses: list[Tensor]
    logits: list[list[Tensor]]


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    queries: Sequence[Tensor],
    settings: SamplingConfig,
    generator: torch.Generator,
    ends: Sequence[int] | None = None,
    keep_logits: bool = False,
) -> Sampled:
    """Samples one response per query, all in one batch. The model must be in `eval()`.

    Samples like `model.generate` with less work: shared prompt prefixes are encoded once, and finished rows leave the
    batch. Both savings change the last bits of the logits. The host waits for the device once per token, to see which
    responses have ended.

    Args:
        queries: 1-d tensors of token ids on the CPU.
        settings: how tokens are drawn. A response ends with its first end token, with the token that completes its
            first stop text, or after `max_new_tokens`.
        generator: source of all random numbers (`cory/streams.py`).
        ends: end tokens; by default the model's and the tokenizer's.
        keep_logits: whether to return the logits.
    """
    ends = end_tokens(model, tokenizer) if ends is None else ends
    has_ended = partial(ends_response, reader(tokenizer), ends, settings.stop)
    warp = warpers(settings)
    pad_id = pad_token(tokenizer)
    if not keeps_keys_and_values(model):
        return _sample_by_generate(
            model, queries, pad_id, settings.max_new_tokens, warp, generator, has_ended, keep_logits
        )

    ids, mask, positions, logits, cache, is_padded = _read_prompts(model, queries, pad_id)
    responses: list[list[int]] = [[] for _ in queries]
    kept_logits: list[list[Tensor]] = [[] for _ in queries]
    unfinished = set(range(len(queries)))
    rows = list(range(len(queries)))  # indices of the queries still in the batch
    while True:
        if keep_logits:
            for row, row_logits in zip(rows, logits, strict=True):
                if row in unfinished:
                    kept_logits[row].append(row_logits)

        tokens = draw(warp(ids, logits.float()).softmax(-1), generator)
        ids = torch.cat([ids, tokens], 1)
        # Appends a 1, as the last position is never padding.
        mask = torch.cat([mask, mask[:, -1:]], 1)
        positions = positions[:, -1:] + 1

        for row, token in zip(rows, tokens[:, 0].tolist(), strict=True):
            if row not in unfinished:
                continue
            responses[row].append(token)
            if len(responses[row]) == settings.max_new_tokens or has_ended(responses[row]):
                unfinished.remove(row)
        if not unfinished:
            return Sampled([torch.tensor(response) for response in responses], kept_logits)
        if len(unfinished) <= len(rows) * 7 / 8:  # copying the cache pays only if enough rows leave
            kept = [number for number, row in enumerate(rows) if row in unfinished]
            rows = [rows[number] for number in kept]
            index = to_device(torch.tensor(kept), ids.device)
            ids = ids[index]
            mask = mask[index]
            positions = positions[index]
            tokens = tokens[index]
            cache.batch_select_indices(index)
        is_any_padded = any(is_padded[row] for row in rows)
        logits = _next_logits(model, tokens, mask, positions, cache, is_any_padded)


class _Prompts(NamedTuple):
    """A batch of encoded prompts, padded on the left.

    Args:
        ids: token ids (batch, P).
        mask: 0 at padding, over all positions in the cache: (batch, P), or wider with shared prefixes.
        positions: positions (batch, new) of the newest tokens.
        logits: logits (batch, vocabulary) of each prompt's next token.
        cache: keys and values of all tokens so far.
        is_padded: whether each row has padding.
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    logits: Tensor
    cache: KeysAndValues
    is_padded: list[bool]


def _read_prompts(model: PreTrainedModel, queries: Sequence[Tensor], pad_id: int) -> _Prompts:
    """Encodes the prompts, each distinct prompt and each shared prefix only once."""
    prompts = [tuple(query.tolist()) for query in queries]
    row_of_prompt = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    distinct = list(row_of_prompt)
    ids, mask = _padded([torch.tensor(prompt) for prompt in distinct], pad_id, device_of(model))
    stems = read_stems(model, distinct, pad_id)
    if stems is None:
        cache = KeysAndValues(config=model.config)
        num_new = ids.shape[1]
        is_padded = [len(prompt) < num_new for prompt in prompts]
    else:
        cache = stems.cache
        num_new = max(map(len, stems.rests))
        _, rest_mask = pad([torch.tensor(rest) for rest in stems.rests], pad_id, "left")
        mask = torch.cat([stems.mask, to_device(rest_mask, ids.device)], 1)
        is_padded = [True] * len(prompts)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -num_new:]
    logits = _next_logits(model, ids[:, -num_new:], mask, positions, cache, any(is_padded))
    if len(distinct) < len(prompts):
        copies = to_device(torch.tensor([row_of_prompt[prompt] for prompt in prompts]), ids.device)
        ids = ids[copies]
        mask = mask[copies]
        positions = positions[copies]
        logits = logits[copies]
        cache.batch_select_indices(copies)
    return _Prompts(ids, mask, positions, logits, cache, is_padded)


def _next_logits(
    model: PreTrainedModel,
    tokens: Tensor,
    mask: Tensor,
    positions: Tensor,
    cache: DynamicCache,
    is_padded: bool,
) -> Tensor:
    """Runs the model on each text's newest tokens; returns the logits (rows, vocabulary) of the next token.

    Args:
        tokens: newest tokens (rows, new) of each text, padded on the left.
        mask: 0 at padding, over the cache and the new tokens (rows, positions).
        positions: positions (rows, new) of the tokens in their texts.
        is_padded: whether the mask contains a 0.
    """
    output = model(
        tokens,
        attention_mask=whole_mask(model, mask, tokens.shape[1], is_padded),
        past_key_values=cache,
        use_cache=True,
        **accepted(model, {"logits_to_keep": 1, "position_ids": positions}),
    )
    return output.logits[:, -1]


def _padded(queries: Sequence[Tensor], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns queries as ids (rows, width), padded on the left, and their mask, on `device`."""
    ids, mask = pad(queries, pad_id, "left")
    # Padding repeats the row's last token, so that a repetition penalty sees no token that is not in the row.
    ids = torch.where(mask.bool(), ids, ids[:, -1:])
    return to_device(ids, device), to_device(mask, device)


def warpers(settings: SamplingConfig) -> LogitsProcessorList:
    """Returns the processors that the settings apply to logits before a token is drawn, in transformers' order.

    A model's generation_config.json is ignored: Llama-2-chat's temperature of 0.6, for example, would make samples
    off-policy.
    """
    chosen = LogitsProcessorList()
    if settings.repetition_penalty != 1.0:
        chosen.append(logits_process.RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.temperature != 1.0:
        chosen.append(logits_process.TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        chosen.append(logits_process.TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        chosen.append(logits_process.TopPLogitsWarper(settings.top_p))
    return chosen


def draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draws one token per row, (rows, 1), from probabilities (rows, vocabulary).

    One random number per row inverts the distribution function; `torch.multinomial` would draw one for every token of
    the vocabulary. Sums are in float64 to stay accurate over 50,000 terms. The generator is on the CPU, so a seed gives
    the same numbers on every device.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(len(cumulative), 1, dtype=torch.float64, generator=generator)
    chosen = to_device(uniform, cumulative.device) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, chosen, right=True)
    return tokens.clamp(max=cumulative.shape[1] - 1)


def ends_response(
    read: Callable[[Sequence[int]], str],
    ends: Sequence[int],
    stop: Sequence[str],
    response: Sequence[int],
) -> bool:
    """Whether a response's last token is an end token or completes a stop text."""
    if response[-1] in ends:
        return True
    if not stop:
        return False
    tail = 8 + max(len(text.encode()) for text in stop)  # enough tokens to contain any stop text
    # A tail that starts inside a character is decoded differently. A character has at most four tokens, so one of four
    # tails does not.
    starts = {max(0, len(response) - tail - shift) for shift in range(4)}
    tails = (read(response[start:]) for start in starts)
    if not any(text in written for written in tails for text in stop):
        return False
    whole = read(response)
    return any(text in whole for text in stop)


# Models with other caches, sampled by transformers' `generate`


def keeps_keys_and_values(model: PreTrainedModel | PeftModel) -> bool:
    """Whether a model caches only keys and values, and takes them as `past_key_values`.

    Recurrent models also cache states. Some take these under another name and silently ignore `past_key_values`.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if "past_key_values" not in inspect.signature(base.forward).parameters:
        return False
    layers = DynamicCache(config=base.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


class _Draw(LogitsProcessor):
    """Makes `generate` choose the tokens that `draw` returns."""

    def __init__(self, warp: LogitsProcessorList, generator: torch.Generator) -> None:
        self.warp = warp
        self.generator = generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = draw(self.warp(input_ids, scores).softmax(-1), self.generator)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, 0.0)


class _Ended(StoppingCriteria):
    """Tells `generate` which responses end with their newest token. `width` is the prompts' width."""

    def __init__(self, has_ended: Callable[[Sequence[int]], bool], width: int) -> None:
        self.has_ended = has_ended
        self.width = width

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        responses = input_ids[:, self.width :].tolist()
        return to_device(torch.tensor(list(map(self.has_ended, responses))), input_ids.device)


def _sample_by_generate(
    model: PreTrainedModel,
    queries: Sequence[Tensor],
    pad_id: int,
    max_new_tokens: int,
    warp: LogitsProcessorList,
    generator: torch.Generator,
    has_ended: Callable[[Sequence[int]], bool],
    keep_logits: bool,
) -> Sampled:
    """Implements `sample` by transformers' `generate`."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model  # adapters stay active
    ids, mask = _padded(queries, pad_id, device_of(model))
    width = ids.shape[1]
    # `generate` would take any missing setting from the model's generation configuration.
    model_settings = base.generation_config
    base.generation_config = GenerationConfig()
    try:
        output = base.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=0,
                use_cache=True,
                disable_compile=True,
                return_dict_in_generate=True,
                output_logits=keep_logits,
            ),
            logits_processor=LogitsProcessorList([_Draw(warp, generator)]),
            stopping_criteria=StoppingCriteriaList([_Ended(has_ended, width)]),
            synced_gpus=False,  # `sharding.gathered` keeps the full policy
        )
    finally:
        base.generation_config = model_settings

    # `generate` continues finished rows until all rows have ended.
    responses = []
    for tokens in output.sequences[:, width:].tolist():
        length = next((n for n in range(1, len(tokens)) if has_ended(tokens[:n])), len(tokens))
        responses.append(torch.tensor(tokens[:length]))
    if not keep_logits:
        return Sampled(responses, [[] for _ in queries])
    logits = [
        [step[row] for step in output.logits[: len(response)]]
        for row, response in enumerate(responses)
    ]
    return Sampled(responses, logits)
