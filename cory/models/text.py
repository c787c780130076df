"""Between text and token ids: prompts, responses, the tokens that pad and end, and how much a model can read."""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from cory.errors import UserError

# How prompts become a chat (`model.chat_template`).
ChatTemplate = bool | Mapping[str, Any]


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    chat_template: ChatTemplate = False,
    date: str | None = None,
) -> list[list[int]]:
    """Token ids of prompts: text unchanged, or with `chat_template` as a user turn; chat messages
    always as turns.

    A text begins with the tokenizer's begin token, if it has one, and has no end token behind it,
    as a response continues it.

    A mapping sets options of the template. The generation prompt follows the turns. A template that writes the date, as
    Llama's, writes `date`, such as 2026-11-26; None: today's. Raises a UserError if the tokenizer has no chat template,
    or the template rejects a prompt's messages.
    """
    if not are_turns(prompts, chat_template):
        begin = _begin(tokenizer)
        rows = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
        return [ids if ids[: len(begin)] == begin else begin + ids for ids in rows]
    template, options = _template(tokenizer, chat_template)
    words = {*re.findall(r"\w+", template)} - {"messages", "add_generation_prompt"}
    for key in options:  # a template ignores what it does not know
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
            # A template's `strftime_now` reads this clock: transformers passes on no other function.
            with patch.object(chat_template_utils, "datetime", clock):
                text = tokenizer.apply_chat_template(
                    turns,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=True,
                    **options,
                )
        except Exception as error:  # of a template without a system message, or with a fault
            raise UserError(
                f"prompt in row {row + 1}: expected messages that the chat template takes, got {prompt!r} ({error})"
            ) from None
        texts.append(text)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template has written them


def encode_responses(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    texts: Sequence[str],
    chat_template: ChatTemplate = False,
) -> list[list[int]]:
    """Token ids of texts as responses to prompts, without an end token.

    A text prompt is continued after a space, unless it ends in whitespace; the turn of a chat is the text as it is.
    """
    if are_turns(prompts, chat_template):
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    # Behind a line break, as SentencePiece's tokenizers write a space before the first word of a text.
    before = tokenizer("\n", add_special_tokens=False)["input_ids"]
    continued = [
        f"\n{text}" if prompt[-1:].isspace() else f"\n {text}"
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    rows = tokenizer(continued, add_special_tokens=False)["input_ids"]
    return [ids[len(before) :] for ids in rows]


def _begin(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts before a text."""
    whole = tokenizer("a")["input_ids"]
    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    return whole[: whole.index(text[0])] if text else []


def _template(
    tokenizer: PreTrainedTokenizerBase, chat_template: ChatTemplate
) -> tuple[str, Mapping[str, Any]]:
    """The tokenizer's chat template, and the options that a setting gives it. Raises a UserError if there is none."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        key = "model.chat_template" if chat_template else "model.name"
        raise UserError(
            f"{key}: expected a tokenizer with one chat template, or one named default, got {tokenizer.name_or_path!r}"
        ) from None
    return template, chat_template if isinstance(chat_template, Mapping) else {}


def are_turns(prompts: Sequence[Any], chat_template: ChatTemplate = False) -> bool:
    """Whether prompts, and so their responses, are turns of a chat; else a response continues its prompt's text."""
    return chat_template is not False or not all(isinstance(prompt, str) for prompt in prompts)


def plain_texts(
    tokenizer: PreTrainedTokenizerBase,
    responses: Iterable[torch.Tensor],
    stop: Sequence[str] = (),
    turn: bool = False,
) -> list[str]:
    """The text of each response before its first stop text, without special tokens, even those that
    ordinary tokens spell.

    The text goes into another agent's prompt and to the reward function, where a special token
    would act as one. A `turn` is a text of its own, so a space before its first word, which
    SentencePiece's tokenizers write, is left out; in other responses it belongs to them.
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
    """The texts that a tokenizer reads as control tokens."""
    # Chat models have special tokens that no setting of the tokenizer names.
    added = tokenizer.added_tokens_decoder.values()
    return [*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)]


def control_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What acts in a prompt: special tokens, and added ones that the chat template writes, as DeepSeek's do."""
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
    """From the ids of a response to its text as it continues a prompt, special tokens included.

    In this text stop texts are found. At the start of a text SentencePiece's tokenizers drop a space.
    """
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    length = len(decode(tokenizer, before))

    def read(ids: Sequence[int]) -> str:
        return decode(tokenizer, [*before, *ids])[length:]

    return read


def decode(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip_special_tokens: bool = False
) -> str:
    """The text of token ids, without a last character that they hold a part of only, as where a limit has cut it.

    What is no character in their midst stays as U+FFFD: the model has written it so.
    """
    texts = []
    for count in range(len(ids), max(len(ids) - 4, -1), -1):  # a part has at most 3 bytes
        kept = list(ids[:count])
        text = tokenizer.decode(
            kept, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        is_part = text.endswith("\ufffd")
        if is_part and tokenizer(text, add_special_tokens=False)["input_ids"] == kept:
            is_part = False  # U+FFFD itself
        texts.append(text.rstrip("\ufffd") if is_part else text)
        if not is_part:
            break
    # Some tokenizers show all bytes beside the part as U+FFFD, too: with fewer tokens there is more text.
    return max(texts, key=len)


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


def turn_stop(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: ChatTemplate,
    stop: Sequence[str],
) -> list[str]:
    """The stop text of a turn: what the chat template writes behind an answer, up to its first added token.

    Empty where that is an end token already, where the template writes nothing there, and where it
    does not take a question and an answer, or changes them. Warns if the template writes nothing
    there and the settings have no stop text either, `stop`.
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
    _, found, close = text.rpartition(answer)
    if not found:
        return []
    added = tokenizer.added_tokens_decoder
    ids = tokenizer(close.strip(), add_special_tokens=False)["input_ids"]
    first = next((token for token in ids if token in added), None)
    if first is not None:
        close = str(added[first])
        if added[first].special and first in end_tokens(policy, tokenizer):
            return []
    if close.strip():
        return [close.strip()]
    if not stop:
        warnings.warn(
            f"The chat template of {tokenizer.name_or_path!r} writes nothing behind an answer: one without an end "
            "token runs on into the next turn. Set sampling.stop to the text that begins a turn",
            stacklevel=2,
        )
    return []


def check_lengths(
    lengths: list[int], max_new_tokens: int, context: int | None, prompts: Sequence[Any]
) -> None:
    """Raises a UserError that names the first row with no tokens, or too many for the model's context."""
    for row, length in enumerate(lengths):
        if length == 0:
            raise UserError(
                f"prompt in row {row + 1}: expected at least one token, got {prompts[row]!r}"
            )
        if context is not None and length + max_new_tokens > context:
            came = f"{length} of the prompt + {max_new_tokens} of the response = {length + max_new_tokens}"
            raise UserError(
                f"prompt in row {row + 1}: expected at most {context} tokens, the model's context, got {came}"
            )


def context_length(model: PreTrainedModel) -> int | None:
    """Tokens that the model can attend to; None if its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)
