"""Each role's prompts, made by templates or functions from the query and earlier responses (knowledge transfer, Eq. 3).

A role is a position in the chain of agents: the pioneer answers first, then the observers.
"""

import copy
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cory.code_files import Loaded, awaited, is_code, load_code
from cory.config import RoleConfig, role_name
from cory.errors import UserError

Prompt = str | list[dict[str, str]]  # text, or chat messages
# An observer's default templates, for text continuation and for chat.
OBSERVER = "{prompt}{response}\n{prompt}"
CHAT_OBSERVER = "{prompt}\n\nHere is an answer to this:\n\n{response}\n\nGive a better answer."
# `prompt(row, responses)`, given a row's columns and earlier responses by role, returns text or messages. May be async.
PromptFunction = Callable[[dict[str, Any], dict[str, str]], Any]
NO_SETTINGS = RoleConfig()  # all null


def text_of(prompt: Prompt) -> str:
    """Returns the text that replaces {prompt} in a template; for chat messages, the last message's text."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def query_text(prompt: Prompt) -> str:
    """Returns the whole query, as shown in samples and reports. Several chat messages are shown with their roles."""
    if isinstance(prompt, str) or len(prompt) == 1:
        return text_of(prompt)
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def placeholders(template: str, where: str) -> list[str]:
    """Returns the names in braces in a template; `{{` and `}}` stand for literal braces.

    Raises a UserError if the braces do not match, or contain more than a name, such as an attribute or an index.
    """
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(
            f"{where}: expected a template with placeholders like {{prompt}}, got {template!r} ({error})"
        ) from None
    names = []
    for _, name, form, conversion in fields:
        if name is None:  # the text after the last placeholder
            continue
        if not name.isidentifier() or form or conversion:
            got = f"{name}{'!' if conversion else ''}{conversion or ''}{':' if form else ''}{form}"
            raise UserError(
                f"{where}: expected plain names in braces, got {{{got}}} in {template!r}"
            )
        names.append(name)
    return names


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Replaces each placeholder of a template by its value. Braces inside the values stay unchanged."""
    parts = string.Formatter().parse(template)
    return "".join(text + ("" if name is None else str(values[name])) for text, name, _, _ in parts)


@dataclass(frozen=True)
class RolePrompts:
    """The prompts of all roles. Each is a function, or a template with these placeholders:

    * `{prompt}`: the query.
    * `{response}`: the preceding role's response; `{responses}`: all earlier roles' responses, joined by blank lines.
    * `{pioneer}`, or the name of any earlier role: that role's response.
    * the dataset's other columns.

    A function `prompt(row, responses)` receives a row's columns and the earlier responses by role name, and returns
    text or chat messages. It is called once per row; calls of an async function run concurrently.

    Args:
        pioneer: the first role's prompt; a template needs {prompt}.
        observer: every later role's prompt; a template needs {prompt} and {response}.
        roles: settings of the roles, in order (`Config.roles`). Names and prompts given there take precedence. Empty:
            the default names and the prompts above.
        code: the loaded functions that `roles` names, by FILE.py:NAME; set by `loaded`.

    Raises:
        UserError: a required placeholder is missing, or a placeholder names no earlier role.

    >>> prompts = RolePrompts(observer='Improve "{prompt}{response}": {prompt}')
    >>> prompts.render(1, {"prompt": "The film"}, [" was bad"])
    'Improve "The film was bad": The film'
    >>> def count(row, responses):
    ...     return f"{len(responses['pioneer'])} letters. {row['prompt']}"
    >>> RolePrompts(observer=count).render(1, {"prompt": "The film"}, [" was bad"])
    '8 letters. The film'
    """

    pioneer: str | PromptFunction = "{prompt}"
    observer: str | PromptFunction = OBSERVER
    roles: tuple[RoleConfig, ...] = ()
    code: Mapping[str, Loaded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pioneer_reads = ["prompt"]
        observer_reads = ["prompt", "response"]
        if isinstance(self.pioneer, str):
            pioneer_reads = placeholders(self.pioneer, "pioneer prompt")
        if isinstance(self.observer, str):
            observer_reads = placeholders(self.observer, "observer prompt")
        if "prompt" not in pioneer_reads or "response" in pioneer_reads:
            raise UserError(
                f"pioneer prompt: expected the placeholder {{prompt}} and no {{response}}, got {self.pioneer!r}. "
                "The pioneer answers first, so it reads no response"
            )
        if not {"prompt", "response"} <= set(observer_reads):
            raise UserError(
                f"observer prompt: expected the placeholders {{prompt}} and {{response}}, got {self.observer!r}"
            )

    def loaded(self) -> "RolePrompts":
        """Returns these prompts with the functions named in `roles` loaded. Raises a UserError if loading fails."""
        code = {
            role.prompt: load_code(f"roles.{index}.prompt", role.prompt)
            for index, role in enumerate(self.roles)
            if role.prompt is not None and is_code(role.prompt)
        }
        return replace(self, code=code)

    def settings(self, role: int) -> RoleConfig:
        """Returns the settings of role `role` (from 0); all are null if the role has none."""
        return self.roles[role] if role < len(self.roles) else NO_SETTINGS

    def name(self, role: int) -> str:
        """Returns the name of a role: the configured one, or `pioneer`, `observer`, `observer_2`, ..."""
        return self.settings(role).name or role_name(role)

    def template(self, role: int) -> str | PromptFunction:
        """Returns what makes a role's prompts (with knowledge transfer on): a template, FILE.py:NAME, or a function."""
        template = self.settings(role).prompt
        if template is not None:
            return template
        return self.pioneer if role == 0 else self.observer

    def function(self, role: int) -> PromptFunction | None:
        """Returns the function that makes a role's prompts; None if a template makes them."""
        template = self.template(role)
        if not isinstance(template, str):
            return template
        return self.code[template].value if is_code(template) else None

    def placeholders(self, role: int) -> list[str]:
        """Returns the placeholders of a role's template; empty for a function."""
        template = self.template(role)
        if not isinstance(template, str) or is_code(template):
            return []
        return placeholders(template, f"prompt of {self.name(role)}")

    def reads(self, role: int) -> list[int]:
        """Returns the earlier roles whose responses a role's template contains, listed once per occurrence."""
        earlier = {self.name(index): [index] for index in range(role)}
        earlier |= {"response": [role - 1], "responses": list(range(role))}
        return [index for name in self.placeholders(role) for index in earlier.get(name, [])]

    def columns(self) -> list[str]:
        """Returns the dataset's columns that the templates use, except `prompt`."""
        roles = range(max(2, len(self.roles)))
        answers = {"prompt", "response", "responses", *(self.name(role) for role in roles)}
        names = [name for role in roles for name in self.placeholders(role)]
        return list(dict.fromkeys(name for name in names if name not in answers))

    def render(
        self, role: int, row: Mapping[str, Any], responses: Sequence[str] | None = None
    ) -> Any:
        """Returns the prompt of `role` (0 is the pioneer) for one row of the dataset, like `render_rows`."""
        columns = {name: [value] for name, value in row.items()}
        earlier = None if responses is None else [[response] for response in responses]
        return self.render_rows(role, columns, earlier)[0]

    def render_rows(
        self,
        role: int,
        columns: Mapping[str, Sequence[Any]],
        responses: Sequence[Sequence[str]] | None = None,
    ) -> list[Any]:
        """Returns a role's prompts, one per row of `columns`. For chat messages, a template changes only the last one.

        Args:
            responses: the earlier roles' responses, one list per role with an entry per row. None: the role reads only
                the query, in the pioneer's prompt.
        """
        if responses is None:
            role = 0
        rows = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        names = [self.name(index) for index in range(role)]
        texts = zip(*responses, strict=True) if responses else [()] * len(rows)
        chains = [dict(zip(names, chain, strict=True)) for chain in texts]
        function = self.function(role)
        if function is None:
            return [self._fill(role, row, chain) for row, chain in zip(rows, chains, strict=True)]
        # Copy deeply, so that a function that changes its row in place does not affect the reward.
        return awaited(
            [function(copy.deepcopy(row), chain) for row, chain in zip(rows, chains, strict=True)]
        )

    def _fill(self, role: int, row: Mapping[str, Any], responses: Mapping[str, str]) -> Any:
        template = self.template(role)
        assert isinstance(template, str)
        prompt: Prompt = row["prompt"]
        # If a column and a role have the same name, the column takes precedence.
        values = {**responses, **row, "prompt": text_of(prompt)}
        if responses:
            values["response"] = [*responses.values()][-1]
            values["responses"] = "\n\n".join(responses.values())
        text = fill(template, values)  # Eq. 3
        return text if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": text}]
