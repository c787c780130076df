"""What each role reads (knowledge transfer, Eq. 3)."""

import json
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cory.errors import UserError

Prompt = str | list[dict[str, str]]  # text, or chat messages
# What an observer reads where a task says nothing else: of a text that models continue, and of a chat.
OBSERVER = "{prompt}{response}\n{prompt}"
CHAT_OBSERVER = "{prompt}\n\nHere is an answer to this:\n\n{response}\n\nGive a better answer."
CHAT_ROLES = ("system", "user", "assistant")


def check_prompt(prompt: Any, where: str) -> None:
    """Raises a UserError unless a query is text, or chat messages ending with the user's, and not empty."""
    if isinstance(prompt, str) and prompt:
        return
    is_chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not is_chat:
        raise UserError(f"{where}: expected text or chat messages, got {prompt!r}")
    are_messages = all(m.get("role") in CHAT_ROLES and isinstance(m.get("content"), str) for m in prompt)
    if not (prompt and are_messages and prompt[-1]["role"] == "user" and prompt[-1]["content"]):
        raise UserError(
            f"{where}: expected messages of {{role, content}}, roles {', '.join(CHAT_ROLES)}, the last one user, with "
            f"text, got {prompt!r}"
        )


def text_of(prompt: Prompt) -> str:
    """The text that a template fills in as {prompt}; for chat messages, the last one's."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def query_text(prompt: Prompt) -> str:
    """The whole text of a query, by which two are the same; of chat messages, all roles and texts."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps([[message["role"], message["content"]] for message in prompt])


def placeholders(template: str, where: str) -> list[str]:
    """The names in braces in a template; `{{` and `}}` stand for braces themselves.

    Raises a UserError if the braces do not match, or hold more than a name: no attribute or index is looked up.
    """
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        expected = "a template with placeholders like {prompt}"
        raise UserError(f"{where}: expected {expected}, got {template!r} ({error})") from None
    for name in names:
        if not name.isidentifier():
            raise UserError(f"{where}: expected plain names in braces, got {{{name}}} in {template!r}")
    return names


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template with each placeholder replaced; braces inside the values are left as they are."""
    parts = string.Formatter().parse(template)
    return "".join(text + ("" if name is None else str(values[name])) for text, name, _, _ in parts)


@dataclass(frozen=True)
class RolePrompts:
    """Templates over {prompt}, {response} (of the preceding role) and the dataset's other columns.

    Args:
        pioneer: what the first role reads; needs {prompt}.
        observer: what every later role reads; needs {prompt} and {response}.

    Raises:
        UserError: a placeholder that is needed is missing.

    >>> RolePrompts(observer='Improve "{prompt}{response}": {prompt}').render(1, {"prompt": "The film"}, " was bad")
    'Improve "The film was bad": The film'
    """

    pioneer: str = "{prompt}"
    observer: str = OBSERVER

    def __post_init__(self) -> None:
        for role, needed in (("pioneer", ("prompt",)), ("observer", ("prompt", "response"))):
            template = getattr(self, role)
            names = placeholders(template, f"{role} prompt")
            for name in needed:
                if name not in names:
                    raise UserError(f"{role} prompt: expected the placeholder {{{name}}}, got {template!r}")
        if "response" in placeholders(self.pioneer, "pioneer prompt"):
            raise UserError(
                f"pioneer prompt: expected no {{response}}, as nobody answers before it, got {self.pioneer!r}"
            )

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises a UserError if a template names a column that the dataset lacks."""
        available = {*columns, "prompt", "response"}
        for role in ("pioneer", "observer"):
            for name in placeholders(getattr(self, role), role):
                if name not in available:
                    expected = f"placeholders among the dataset's columns {sorted(available)}"
                    raise UserError(f"{role} prompt: expected {expected}, got {{{name}}}")

    def render(self, role: int, row: Mapping[str, Any], response: str | None = None) -> Any:
        """The prompt of `role` (0 is the pioneer) for one row of the dataset.

        `response` is that of the preceding role; None renders the pioneer's prompt, whatever the role. In chat messages
        only the last one is rendered.
        """
        template = self.pioneer if role == 0 or response is None else self.observer
        prompt: Prompt = row["prompt"]
        text = fill(template, {**row, "prompt": text_of(prompt), "response": response})
        return text if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": text}]


def fit_responses(
    render: Callable[[list[str]], list[Any]],
    responses: Sequence[str],
    encode: Callable[[list[Any]], list[list[int]]],
    context: int | None,
    max_new_tokens: int,
) -> list[Any]:
    """Observers' prompts that leave room for an answer: a response too long to read is halved until its prompt fits.

    Rare, as the trainer checks that responses of full length fit; but broken text can take more tokens to read than it
    took to write.

    Args:
        render: from responses to prompts, row by row. encode: from prompts to their token ids.
        context: tokens that the observer can attend to; None: any number. max_new_tokens: of the observer's answer.

    A row that is too long even without a response is kept; the agent refuses it.
    """
    texts = list(responses)
    prompts = render(texts)
    if context is None:
        return prompts
    room = context - max_new_tokens
    # A token is at least a byte, so most batches of text stop here; a chat template adds tokens of its own.
    while any(not isinstance(prompt, str) or len(prompt.encode()) >= room for prompt in prompts):
        lengths = [len(ids) for ids in encode(prompts)]
        too_long = [row for row, tokens in enumerate(lengths) if tokens > room and texts[row]]
        if not too_long:
            break
        for row in too_long:
            texts[row] = texts[row][: len(texts[row]) // 2]
        prompts = render(texts)
    return prompts
