"""Between text and token ids: prompts, responses, the tokens that pad and end, and how much a model can read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.errors import UserError, expect


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    chat_template: bool | Mapping[str, Any] = False,
    date: str | None = None,
) -> list[list[int]]:
    """Token ids of prompts: text unchanged, or with `chat_template` as a user turn; chat messages
    always as turns.

    A mapping sets options of the template. The generation prompt follows the turns. A template that
    writes the date, as Llama's, writes `date`, such as 2026-11-26; None: today's. Raises a UserError
    if the tokenizer has no chat template, or the template rejects a prompt's messages.
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
    template = tokenizer.get_chat_template()
    words = re.findall(r"\w+", template)
    for key in options:  # a template ignores what it does not know
        is_read = key in words and key not in ("messages", "add_generation_prompt")
        expect(is_read, "model.chat_template", f"options that {name}'s template reads", key)
    if date is not None:
        template = _with_date(template, date)

    texts = []
    for row, prompt in enumerate(prompts):
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = tokenizer.apply_chat_template(
                turns,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        except TemplateError as error:  # as of a template without a system message
            raise UserError(
                f"prompt in row {row + 1}: expected messages that the chat template takes, got {prompt!r} ({error})"
            ) from None
        texts.append(text)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template has written them


def _with_date(template: str, date: str) -> str:
    """A chat template that writes `date` where it would write today's: `strftime_now("%d %b %Y")`.

    The call is replaced in the text, as transformers passes no functions to a template.
    """
    day = datetime.fromisoformat(date)
    return re.sub(
        r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""",
        lambda call: repr(day.strftime(call[2])),
        template,
    )


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
