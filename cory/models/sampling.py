"""Sampling responses: from token ids to token ids, in one batch, and their text."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jinja2 import TemplateError
from peft import PeftModel
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
from cory.errors import UserError, expect
from cory.models.static import StaticTexts, check_family
from cory.models.texts import Texts, padded, unread, with_stems_read
from cory.models.window import read_stems
from cory.parallel.devices import to_device
from cory.parallel.sharding import device_of


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    chat_template: bool | Mapping[str, Any] = False,
) -> list[list[int]]:
    """Token ids of prompts: text unchanged, or with `chat_template` as a user turn; chat messages
    always as turns.

    A mapping sets options of the template. The generation prompt follows the turns. Raises a
    UserError if the tokenizer has no chat template, or the template rejects a prompt's messages.
    """
    if not are_turns(prompts, chat_template):
        return tokenizer(list(prompts))["input_ids"]
    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        if chat_template:
            raise UserError(
                f"model.chat_template: expected a tokenizer with a chat template, got {name!r}"
            )
        expected = "a tokenizer with a chat template, as the prompts are chat messages"
        raise UserError(f"model.name: expected {expected}, got {name!r}")
    options = chat_template if isinstance(chat_template, Mapping) else {}
    words = re.findall(r"\w+", tokenizer.get_chat_template())
    for key in options:  # a template ignores what it does not know
        is_read = key in words and key not in ("messages", "add_generation_prompt")
        expect(is_read, "model.chat_template", f"options that {name}'s template reads", key)

    texts = []
    for row, prompt in enumerate(prompts):
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **options
            )
        except TemplateError as error:  # as of a template without a system message
            raise UserError(
                f"prompt in row {row + 1}: expected messages that the chat template takes, got {prompt!r} ({error})"
            ) from None
        texts.append(text)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template has written them


def are_turns(prompts: Sequence[Any], chat_template: bool | Mapping[str, Any] = False) -> bool:
    """Whether prompts, and so their responses, are turns of a chat; else a response continues its prompt's text."""
    return chat_template not in (False, None) or not all(
        isinstance(prompt, str) for prompt in prompts
    )


def plain_texts(
    tokenizer: PreTrainedTokenizerBase,
    responses: Iterable[torch.Tensor],
    stop: Sequence[str] = (),
    turn: bool = False,
) -> list[str]:
    """The text of each response before its first stop text, without special tokens, even those that
    ordinary tokens spell.

    The text goes into another agent's prompt and to the reward function, where a special token
    would act as one. A `turn` is a text of its own; other responses continue one, so a space before
    the first word belongs to them, which SentencePiece's tokenizers drop at the start of a text.
    """
    before = [] if turn else tokenizer("a", add_special_tokens=False)["input_ids"]
    length = len(_decode(tokenizer, before))
    # Chat models have special tokens that no setting of the tokenizer names.
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    texts = []
    for ids in responses:
        text = _without(special, _decode(tokenizer, [*before, *ids.tolist()])[length:])
        texts.append(min((text.split(end)[0] for end in stop), key=len, default=text))
    return texts


def _without(special: Iterable[str], text: str) -> str:
    """A text without special tokens, nor those that what was around one of them spells."""
    while True:
        cleaned = text
        for token in special:
            cleaned = cleaned.replace(token, "")
        if cleaned == text:
            return text
        text = cleaned


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def warpers(settings: SamplingConfig) -> LogitsProcessorList:
    """The processors applied to logits before a token is drawn, in transformers' order; none by
    default.

    A model's own generation_config.json is ignored: Llama-2-chat's temperature of 0.6 would make
    samples off-policy.
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


def draw(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token per row of (rows, vocabulary) probabilities, as (rows, 1) on their device.

    Inverts the distribution function with one random number a row; `torch.multinomial` draws one
    for every token of the vocabulary. In float64, so that 50,000 sums lose nothing, and on the
    generator's device.
    """
    device = generator.device
    cumulative = probabilities.to(device).cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(
        len(cumulative), 1, dtype=torch.float64, device=device, generator=generator
    )
    chosen = uniform * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, chosen, right=True).clamp(max=cumulative.shape[1] - 1)
    return tokens.to(probabilities.device)


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    queries: Sequence[torch.Tensor],
    settings: SamplingConfig,
    max_new_tokens: int,
    generator: torch.Generator,
    seen: Sequence[list[torch.Tensor]] = (),
    ends: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Samples one response per query, all in one batch. The model must be in `eval()`.

    Draws what `model.generate` would, with less work: what prompts have in common is read once, and
    rows that have ended leave the batch. That changes logits in their last bits, as does a static
    cache (`settings.cache`, `static.py`). A model that remembers more than keys and values, such as
    Mamba, is run by `generate`, which knows its cache; the tokens are drawn here all the same.

    Queries and responses are 1-d tensors of token ids on the CPU. The program waits for the device
    once per token, to learn which responses have ended. Each ends with its first end token, with
    the token that completes its first stop text, or after `max_new_tokens` tokens. All random
    numbers come from `generator` (`cory/streams.py`). `seen`, where given, has a list for each
    query, which gets the logits (vocabulary) of each of its tokens, as they are before warping.
    `ends`: the end tokens; by default the model's and the tokenizer's.
    """
    if settings.cache == "static":
        check_family(model)
    prompts = [tuple(query.tolist()) for query in queries]
    ends = end_tokens(model, tokenizer) if ends is None else ends
    stopping = Stopping(tokenizer, max(map(len, prompts)), ends, settings.stop)
    warp = warpers(settings)
    if not keeps_keys_and_values(model):
        ids, mask = padded(prompts, pad_token(tokenizer), device_of(model))
        drawing = Drawing(warp, generator, seen, stopping)
        return _sample_by_generate(model, ids, mask, max_new_tokens, drawing, stopping)

    texts: Texts | StaticTexts
    texts, logits = _read_prompts(model, prompts, pad_token(tokenizer))
    if settings.cache == "static":
        # Room for the longest response of any batch: each length of the cache is compiled anew.
        texts = StaticTexts(texts, max(max_new_tokens, settings.max_new_tokens))

    responses: list[list[int]] = [[] for _ in queries]
    unfinished = set(range(len(queries)))
    rows = list(range(len(queries)))  # the queries that are in the batch
    while True:
        if seen:
            for row, row_logits in zip(rows, logits, strict=True):
                if row in unfinished:
                    seen[row].append(row_logits)

        texts.append(draw(warp(texts.ids, logits.float()).softmax(-1), generator))

        for row, token in zip(rows, texts.new[:, 0].tolist(), strict=True):
            if row not in unfinished:
                continue
            responses[row].append(token)
            if len(responses[row]) == max_new_tokens or stopping.has_ended(responses[row]):
                unfinished.remove(row)
        if not unfinished:
            return [torch.tensor(response) for response in responses]
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


class Stopping(StoppingCriteria):
    """Where responses end: with an end token, or with the token that completes a stop text.

    Args:
        width: of the prompts, which stand before the responses. ends: token ids. stop: texts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        width: int,
        ends: Sequence[int],
        stop: Sequence[str],
    ) -> None:
        self.tokenizer = tokenizer
        self.width = width
        self.stop = stop
        self.ends = set(ends)
        # Tokens that surely hold a stop text.
        self.tail = 8 + max((len(text.encode()) for text in stop), default=0)
        # Of the responses that have ended, by row; filled by `generate` alone.
        self.lengths: dict[int, int] = {}

    def has_ended(self, response: list[int]) -> bool:
        """Whether a response's last token ends it."""
        if response[-1] in self.ends:
            return True
        if not self.stop:
            return False
        text = self.tokenizer.decode(response[-self.tail :])
        return any(stop in text for stop in self.stop)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Tells `generate` which rows are done."""
        for row, response in enumerate(input_ids[:, self.width :].tolist()):
            if row not in self.lengths and self.has_ended(response):
                self.lengths[row] = len(response)
        done = [row in self.lengths for row in range(len(input_ids))]
        return to_device(torch.tensor(done), input_ids.device)


class Drawing(LogitsProcessor):
    """Draws each row's next token and leaves no other to `generate`, whose greedy search then takes it."""

    def __init__(
        self,
        warp: LogitsProcessorList,
        generator: torch.Generator,
        seen: Sequence[list[torch.Tensor]],
        stopping: Stopping,
    ) -> None:
        self.warp = warp
        self.generator = generator
        self.seen = seen
        self.stopping = stopping

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.seen:
            for row, logits in enumerate(scores.clone()):
                if row not in self.stopping.lengths:
                    self.seen[row].append(logits)
        new = draw(self.warp(input_ids, scores).softmax(-1), self.generator)
        return torch.full_like(scores, -torch.inf).scatter(-1, new, 0.0)


def _sample_by_generate(
    model: PreTrainedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    max_new_tokens: int,
    drawing: Drawing,
    stopping: Stopping,
) -> list[torch.Tensor]:
    """`sample` for a model whose cache only transformers knows. ids, mask: (rows, width), padded on the left."""
    # Its layers hold the adapters.
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    with _without_generation_config(base):
        whole = base.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=0,
                use_cache=True,
                disable_compile=True,
            ),
            logits_processor=LogitsProcessorList([drawing]),
            stopping_criteria=StoppingCriteriaList([stopping]),
            synced_gpus=False,  # `sharding.gathered` sees to it
        )
    width = ids.shape[1]
    lengths = [stopping.lengths.get(row, max_new_tokens) for row in range(len(ids))]
    rows = whole[:, width:].cpu()
    return [row[:length].clone() for row, length in zip(rows, lengths, strict=True)]


@contextmanager
def _without_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Hides the model's own settings: `generate` reads there whatever its caller leaves open."""
    kept = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


def keeps_keys_and_values(model: PreTrainedModel | PeftModel) -> bool:
    """Whether all that a model remembers of a text are keys and values, handed over as
    `past_key_values`.

    Recurrent models keep states as well. Some take them under another name, and drop
    `past_key_values` silently.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if "past_key_values" not in inspect.signature(base.forward).parameters:
        return False
    layers = DynamicCache(config=base.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id to pad with. Padding is masked everywhere, so any id with an embedding will do."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0


def end_tokens(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a response: the model's, and the tokenizer's, which is of the texts that an adapter was trained
    on, while the model may be its base. Empty where there is none.
    """
    ends = policy.generation_config.eos_token_id
    if ends is None:
        ends = policy.config.eos_token_id
    of_model = ends if isinstance(ends, (list, tuple)) else [ends]
    return [*{end: None for end in (*of_model, tokenizer.eos_token_id) if end is not None}]


def check_lengths(
    lengths: list[int], max_new_tokens: int, context: int | None, prompts: Sequence[Any]
) -> None:
    """Raises a UserError that names the first row with no tokens, or too many for the model's context."""
    for row, length in enumerate(lengths):
        expect(length > 0, f"prompt in row {row + 1}", "at least one token", prompts[row])
        if context is not None and length + max_new_tokens > context:
            came = f"{length} of the prompt + {max_new_tokens} of the response = {length + max_new_tokens}"
            raise UserError(
                f"prompt in row {row + 1}: expected at most {context} tokens, the model's context, got {came}"
            )


def context_length(model: PreTrainedModel) -> int | None:
    """Tokens that the model can attend to; None if its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)
