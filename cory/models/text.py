"""Converts between text and token ids: prompts, responses, pad and end tokens, context lengths."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from cory.errors import UserError
from cory.process import warn

# Type of `model.chat_template`: whether prompts become chats; a mapping also sets options of the template.
ChatTemplate = bool | Mapping[str, Any]


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    chat_template: ChatTemplate = False,
    date: str | None = None,
) -> list[list[int]]:
    """Returns the token ids of prompts: chat messages as turns, and text as it is or as a user turn.

    Text starts with the tokenizer's begin token, if it has one. It has no end token, because the response continues it.
    A chat ends with the generation prompt.

    Args:
        chat_template: whether text becomes a user turn; a mapping also sets options of the template.
        date: date for templates that print one, such as Llama's, in the form 2026-11-26. None: today.

    Raises a UserError if the tokenizer has no chat template, or the template rejects a prompt's messages.
    """
    if not are_turns(prompts, chat_template):
        begin = _begin(tokenizer)
        rows = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
        return [ids if ids[: len(begin)] == begin else begin + ids for ids in rows]
    template, options = _template(tokenizer, chat_template)
    words = {*re.findall(r"\w+", template)} - {"messages", "add_generation_prompt"}
    for key in options:  # templates silently ignore unknown options
        if key not in words:
            raise UserError(
                f"model.chat_template: expected options that {tokenizer.name_or_path}'s template reads, got {key!r}"
            )

    texts = []
    day = datetime.now() if date is None else datetime.fromisoformat(date)
    clock = SimpleNamespace(now=lambda: day)
    for row, prompt in enumerate(prompts):
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            # A template's `strftime_now` reads this clock; transformers offers no way to pass another function.
            with patch.object(chat_template_utils, "datetime", clock):
                text = tokenizer.apply_chat_template(
                    turns,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=True,
                    **options,
                )
        except Exception as error:  # the template is faulty, or takes no system message
            raise UserError(
                f"prompt in row {row + 1}: expected messages that the chat template takes, got {prompt!r} ({error})"
            ) from None
        texts.append(text)
    # The template has already written the special tokens.
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def encode_responses(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    texts: Sequence[str],
    chat_template: ChatTemplate = False,
) -> list[list[int]]:
    """Encodes texts as responses to prompts, without an end token.

    A response continues a text prompt after a space, unless the prompt ends in whitespace. In a chat, the response is
    encoded as it is.
    """
    if are_turns(prompts, chat_template):
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    # Encode after a line break, as SentencePiece tokenizers add a space before the first word of a text.
    line_break = tokenizer("\n", add_special_tokens=False)["input_ids"]
    continued = [
        f"\n{text}" if prompt[-1:].isspace() else f"\n {text}"
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    rows = tokenizer(continued, add_special_tokens=False)["input_ids"]
    return [ids[len(line_break) :] for ids in rows]


def _begin(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids that the tokenizer puts before a text."""
    whole = tokenizer("a")["input_ids"]
    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    return whole[: whole.index(text[0])] if text else []


def _template(
    tokenizer: PreTrainedTokenizerBase, chat_template: ChatTemplate
) -> tuple[str, Mapping[str, Any]]:
    """Returns the tokenizer's chat template and its configured options. Raises a UserError if there is none."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        key = "model.chat_template" if chat_template else "model.name"
        raise UserError(
            f"{key}: expected a tokenizer with one chat template, or one named default, got {tokenizer.name_or_path!r}"
        ) from None
    return template, chat_template if isinstance(chat_template, Mapping) else {}


def are_turns(prompts: Sequence[Any], chat_template: ChatTemplate = False) -> bool:
    """Whether prompts and responses are chat turns; otherwise a response continues its prompt's text."""
    return chat_template is not False or not all(isinstance(prompt, str) for prompt in prompts)


def plain_texts(
    tokenizer: PreTrainedTokenizerBase,
    responses: Iterable[torch.Tensor],
    stop: Sequence[str] = (),
    turn: bool = False,
) -> list[str]:
    """Decodes responses up to their first stop text and removes special tokens, even if ordinary tokens spell them.

    The texts go into other agents' prompts and to the reward function, where special tokens would take effect.

    Args:
        turn: whether responses are chat turns. If so, the space that SentencePiece tokenizers add before a text is
            removed; if not, a leading space belongs to the response.
    """
    special = special_tokens(tokenizer)
    read = reader(tokenizer)
    texts = []
    for response in responses:
        ids = response.tolist()
        whole = read(ids)
        text = min((whole.split(end)[0] for end in stop), key=len, default=whole)
        text = without(special, text)
        if turn and not decode(tokenizer, ids, skip_special_tokens=True).startswith(" "):
            text = text.removeprefix(" ")
        texts.append(text)
    return texts


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the texts that a tokenizer reads as special tokens."""
    # Chat models have special tokens beyond those in the tokenizer's settings.
    added = tokenizer.added_tokens_decoder.values()
    return [*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)]


def control_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the texts that control a prompt: special tokens, and added tokens that the chat template uses."""
    templates = str(tokenizer.chat_template or "")
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    return list(dict.fromkeys([*special_tokens(tokenizer), *(t for t in added if t in templates)]))


def without(special: Iterable[str], text: str) -> str:
    """Removes special tokens until none remains, including any formed by a removal."""
    while True:
        cleaned = text
        for token in special:
            cleaned = cleaned.replace(token, "")
        if cleaned == text:
            return text
        text = cleaned


def reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Returns a function that decodes a response as the continuation of a prompt, including special tokens.

    Stop texts are searched for in the decoded text. The function decodes the response behind a dummy text and then
    cuts the dummy off, because SentencePiece tokenizers would otherwise drop the response's leading space.
    """
    prefix = tokenizer("a", add_special_tokens=False)["input_ids"]
    length = len(decode(tokenizer, prefix))

    def read(ids: Sequence[int]) -> str:
        return decode(tokenizer, [*prefix, *ids])[length:]

    return read


def decode(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip_special_tokens: bool = False
) -> str:
    """Decodes token ids, dropping an incomplete trailing character, such as one cut by a length limit.

    Invalid bytes elsewhere stay as U+FFFD, since the model wrote them.
    """
    texts = []
    # An incomplete character has at most 3 bytes, and so at most 3 tokens.
    for count in range(len(ids), max(len(ids) - 4, -1), -1):
        kept = list(ids[:count])
        text = tokenizer.decode(
            kept, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        is_part = text.endswith("\ufffd")
        if is_part and tokenizer(text, add_special_tokens=False)["input_ids"] == kept:
            is_part = False  # the model wrote U+FFFD itself
        texts.append(text.rstrip("\ufffd") if is_part else text)
        if not is_part:
            break
    # Some tokenizers also show complete characters as U+FFFD if an incomplete one follows. These are removed, too, so
    # fewer tokens can give more text.
    return max(texts, key=len)


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the id to pad with. Padding is masked everywhere, so any id with an embedding will do."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0


def end_tokens(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids that end a response: the model's and the tokenizer's. Empty if there are none.

    The two can differ if the model is an adapter's base: the tokenizer then has the end token of the texts on which the
    adapter was trained.
    """
    ends = policy.generation_config.eos_token_id
    if ends is None:
        ends = policy.config.eos_token_id
    model_ends = ends if isinstance(ends, (list, tuple)) else [ends]
    return [*{end: None for end in (*model_ends, tokenizer.eos_token_id) if end is not None}]


def turn_stop(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: ChatTemplate,
    stop: Sequence[str],
) -> list[str]:
    """Returns the stop text of a chat turn: the template's text after an answer, or the first added token in it.

    The list is empty if that token already ends a response, if the template writes nothing after an answer, or if the
    template rejects or changes a sample question and answer. Warns if the template writes nothing and the settings have
    no stop texts (`stop`) either.
    """
    template, options = _template(tokenizer, chat_template)
    answer = "cory"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(
            turns, chat_template=template, tokenize=False, **options
        )
    except Exception:
        return []
    _, separator, ending = text.rpartition(answer)
    if not separator:
        return []
    added = tokenizer.added_tokens_decoder
    ids = tokenizer(ending.strip(), add_special_tokens=False)["input_ids"]
    first = next((token for token in ids if token in added), None)
    if first is not None:
        ending = str(added[first])
        if added[first].special and first in end_tokens(policy, tokenizer):
            return []
    if ending.strip():
        return [ending.strip()]
    if not stop:
        warn(
            f"The chat template of {tokenizer.name_or_path!r} writes nothing after an answer, so a response without "
            "an end token runs on into the next turn. Set sampling.stop to the text that begins a turn"
        )
    return []


def check_lengths(
    lengths: list[int], max_new_tokens: int, context: int | None, prompts: Sequence[Any]
) -> None:
    """Raises a UserError for the first row that has no tokens, or too many for the model's context."""
    for row, length in enumerate(lengths):
        if length == 0:
            raise UserError(
                f"prompt in row {row + 1}: expected at least one token, got {prompts[row]!r}"
            )
        if context is not None and length + max_new_tokens > context:
            got = f"{length + max_new_tokens}: {length} for the prompt and {max_new_tokens} for the response"
            raise UserError(
                f"prompt in row {row + 1}: expected at most {context} tokens, the model's context length, got {got}"
            )


def context_length(model: PreTrainedModel) -> int | None:
    """Returns the model's context length in tokens; None if its configuration does not state it."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)
