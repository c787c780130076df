"""What each role of a chain reads: templates and their placeholders (knowledge transfer, Eq. 3)."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cory.config import RoleConfig, role_name
from cory.errors import UserError

Prompt = str | list[dict[str, str]]  # text, or chat messages
# What an observer reads where a task says nothing else: of a text that models continue, and of a chat.
OBSERVER = "{prompt}{response}\n{prompt}"
CHAT_OBSERVER = "{prompt}\n\nHere is an answer to this:\n\n{response}\n\nGive a better answer."
NO_SETTINGS = RoleConfig()  # of a role: all null


def text_of(prompt: Prompt) -> str:
    """The text that a template fills in as {prompt}; for chat messages, the last one's."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def query_text(prompt: Prompt) -> str:
    """The whole query, as samples and reports show it; of several chat messages, each with its role."""
    if isinstance(prompt, str) or len(prompt) == 1:
        return text_of(prompt)
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def placeholders(template: str, where: str) -> list[str]:
    """The names in braces in a template; `{{` and `}}` stand for braces themselves.

    Raises a UserError if the braces do not match, or hold more than a name: no attribute or index
    is looked up.
    """
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(
            f"{where}: expected a template with placeholders like {{prompt}}, got {template!r} ({error})"
        ) from None
    names = []
    for _, name, form, conversion in fields:
        if name is None:  # the text after the last one
            continue
        if not name.isidentifier() or form or conversion:
            got = f"{name}{'!' if conversion else ''}{conversion or ''}{':' if form else ''}{form}"
            raise UserError(
                f"{where}: expected plain names in braces, got {{{got}}} in {template!r}"
            )
        names.append(name)
    return names


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template with each placeholder replaced; braces inside the values are left as they are."""
    parts = string.Formatter().parse(template)
    return "".join(text + ("" if name is None else str(values[name])) for text, name, _, _ in parts)


@dataclass(frozen=True)
class RolePrompts:
    """What each role reads: templates over these placeholders.

    * `{prompt}`: the query.
    * `{response}`: the response of the role before; `{responses}`: those of all earlier roles, joined by blank lines.
    * `{pioneer}`, or the name of any earlier role: its response.
    * the dataset's other columns.

    Args:
        pioneer: what the first role reads; needs {prompt}.
        observer: what every later role reads; needs {prompt} and {response}.
        roles: settings of the roles, in order, whose names and prompts replace these: `Config.roles`. Empty: all roles
            have the default names.

    Raises:
        UserError: a placeholder that is needed is missing, or one names no earlier role.

    >>> prompts = RolePrompts(observer='Improve "{prompt}{response}": {prompt}')
    >>> prompts.render(1, {"prompt": "The film"}, [" was bad"])
    'Improve "The film was bad": The film'
    """

    pioneer: str = "{prompt}"
    observer: str = OBSERVER
    roles: tuple[RoleConfig, ...] = ()

    def __post_init__(self) -> None:
        pioneer_reads = placeholders(self.pioneer, "pioneer prompt")
        observer_reads = placeholders(self.observer, "observer prompt")
        if "prompt" not in pioneer_reads or "response" in pioneer_reads:
            raise UserError(
                "pioneer prompt: expected the placeholder {prompt} and no {response}, as nobody answers before it, "
                f"got {self.pioneer!r}"
            )
        if not {"prompt", "response"} <= set(observer_reads):
            raise UserError(
                f"observer prompt: expected the placeholders {{prompt}} and {{response}}, got {self.observer!r}"
            )

    def settings(self, role: int) -> RoleConfig:
        """The settings of a role, from 0 for the first; all null where there are none."""
        return self.roles[role] if role < len(self.roles) else NO_SETTINGS

    def name(self, role: int) -> str:
        """The name of a role: its own, or `pioneer`, `observer`, `observer_2`, ..."""
        return self.settings(role).name or role_name(role)

    def template(self, role: int) -> str:
        """The template of a role that reads the earlier responses."""
        template = self.settings(role).prompt
        if template is not None:
            return template
        return self.pioneer if role == 0 else self.observer

    def reads(self, role: int) -> list[int]:
        """The earlier roles whose responses stand in a role's prompt; one that stands there twice is listed twice."""
        earlier = {self.name(index): [index] for index in range(role)}
        earlier |= {"response": [role - 1], "responses": list(range(role))}
        names = placeholders(self.template(role), f"prompt of {self.name(role)}")
        return [index for name in names for index in earlier.get(name, [])]

    def columns(self) -> list[str]:
        """The dataset's columns that the templates name, besides the query."""
        roles = range(max(2, len(self.roles)))
        answers = {"prompt", "response", "responses", *(self.name(role) for role in roles)}
        names = [
            name for role in roles for name in placeholders(self.template(role), self.name(role))
        ]
        return list(dict.fromkeys(name for name in names if name not in answers))

    def render(
        self, role: int, row: Mapping[str, Any], responses: Sequence[str] | None = None
    ) -> Any:
        """The prompt of `role` (0 is the pioneer) for one row of the dataset.

        `responses` are those of the earlier roles, in order. None: the role answers the query
        alone, so that it reads the pioneer's prompt. In chat messages only the last one is
        rendered.
        """
        if responses is None:
            role = 0
            responses = []
        prompt: Prompt = row["prompt"]
        values = {self.name(index): response for index, response in enumerate(responses)}
        values |= row  # a column hides a role of a default name
        values["prompt"] = text_of(prompt)
        if responses:
            values["response"] = responses[-1]
            values["responses"] = "\n\n".join(responses)
        text = fill(self.template(role), values)  # Eq. 3
        return text if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": text}]

    def render_rows(
        self,
        role: int,
        columns: Mapping[str, Sequence[Any]],
        responses: Sequence[Sequence[str]] | None = None,
    ) -> list[Any]:
        """A role's prompts, one for each row of `columns`.

        `responses`: of each earlier role, in order, its response to each row. None: the pioneer's
        prompts.
        """
        rows = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        if responses is None:
            return [self.render(role, row) for row in rows]
        chains = list(zip(*responses, strict=True)) if responses else [()] * len(rows)
        return [self.render(role, row, chain) for row, chain in zip(rows, chains, strict=True)]
