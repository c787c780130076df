"""What each role of a chain reads: templates with placeholders, or functions (knowledge transfer, Eq. 3)."""

import copy
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cory.code_files import Loaded, awaited, is_code, load_code
from cory.config import RoleConfig, role_name
from cory.errors import UserError

Prompt = str | list[dict[str, str]]  # text, or chat messages
# What an observer reads where a task says nothing else: of a text that models continue, and of a chat.
OBSERVER = "{prompt}{response}\n{prompt}"
CHAT_OBSERVER = "{prompt}\n\nHere is an answer to this:\n\n{response}\n\nGive a better answer."
# `prompt(row, responses)`: the prompt, or messages, from a row's columns and earlier responses by role; may be async.
PromptFunction = Callable[[dict[str, Any], dict[str, str]], Any]
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
    """What each role reads: a template over these placeholders, or a function.

    * `{prompt}`: the query.
    * `{response}`: the response of the role before; `{responses}`: those of all earlier roles, joined by blank lines.
    * `{pioneer}`, or the name of any earlier role: its response.
    * the dataset's other columns.

    A function `prompt(row, responses)` gets the columns of a row and the earlier responses by the names of their roles.
    It is called once per row, and returns text or chat messages; an async one answers all rows at the same time.

    Args:
        pioneer: what the first role reads; a template needs {prompt}.
        observer: what every later role reads; a template needs {prompt} and {response}.
        roles: settings of the roles, in order, whose names and prompts replace these: `Config.roles`. Empty: all roles
            have the default names.
        code: the functions that `roles` name, by FILE.py:NAME; `loaded` fills it.

    Raises:
        UserError: a placeholder that is needed is missing, or one names no earlier role.

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
                "pioneer prompt: expected the placeholder {prompt} and no {response}, as nobody answers before it, "
                f"got {self.pioneer!r}"
            )
        if not {"prompt", "response"} <= set(observer_reads):
            raise UserError(
                f"observer prompt: expected the placeholders {{prompt}} and {{response}}, got {self.observer!r}"
            )

    def loaded(self) -> "RolePrompts":
        """These, with the functions that the settings of the roles name. Raises a UserError if one cannot be loaded."""
        code = {
            role.prompt: load_code(f"roles.{index}.prompt", role.prompt)
            for index, role in enumerate(self.roles)
            if role.prompt is not None and is_code(role.prompt)
        }
        return replace(self, code=code)

    def settings(self, role: int) -> RoleConfig:
        """The settings of a role, from 0 for the first; all null where there are none."""
        return self.roles[role] if role < len(self.roles) else NO_SETTINGS

    def name(self, role: int) -> str:
        """The name of a role: its own, or `pioneer`, `observer`, `observer_2`, ..."""
        return self.settings(role).name or role_name(role)

    def template(self, role: int) -> str | PromptFunction:
        """The template of a role that reads the earlier responses, or what stands in its place."""
        template = self.settings(role).prompt
        if template is not None:
            return template
        return self.pioneer if role == 0 else self.observer

    def function(self, role: int) -> PromptFunction | None:
        """The function that returns a role's prompt; None: a template does."""
        template = self.template(role)
        if not isinstance(template, str):
            return template
        return self.code[template].value if is_code(template) else None

    def placeholders(self, role: int) -> list[str]:
        """The placeholders of a role's template; none of a function."""
        template = self.template(role)
        if not isinstance(template, str) or is_code(template):
            return []
        return placeholders(template, f"prompt of {self.name(role)}")

    def reads(self, role: int) -> list[int]:
        """The earlier roles whose responses stand in a role's template; one that stands there twice is listed twice."""
        earlier = {self.name(index): [index] for index in range(role)}
        earlier |= {"response": [role - 1], "responses": list(range(role))}
        return [index for name in self.placeholders(role) for index in earlier.get(name, [])]

    def columns(self) -> list[str]:
        """The dataset's columns that the templates name, besides the query."""
        roles = range(max(2, len(self.roles)))
        answers = {"prompt", "response", "responses", *(self.name(role) for role in roles)}
        names = [name for role in roles for name in self.placeholders(role)]
        return list(dict.fromkeys(name for name in names if name not in answers))

    def render(
        self, role: int, row: Mapping[str, Any], responses: Sequence[str] | None = None
    ) -> Any:
        """The prompt of `role` (0 is the pioneer) for one row of the dataset; see `render_rows`."""
        columns = {name: [value] for name, value in row.items()}
        earlier = None if responses is None else [[response] for response in responses]
        return self.render_rows(role, columns, earlier)[0]

    def render_rows(
        self,
        role: int,
        columns: Mapping[str, Sequence[Any]],
        responses: Sequence[Sequence[str]] | None = None,
    ) -> list[Any]:
        """A role's prompts, one for each row of `columns`. In chat messages a template fills the last one alone.

        Args:
            responses: of each earlier role, in order, its response to each row. None: the role answers the query
                alone, so that it reads the pioneer's prompt.
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
        # A copy: what the function changes in place, the reward must not read.
        return awaited(
            [function(copy.deepcopy(row), chain) for row, chain in zip(rows, chains, strict=True)]
        )

    def _fill(self, role: int, row: Mapping[str, Any], responses: Mapping[str, str]) -> Any:
        template = self.template(role)
        assert isinstance(template, str)
        prompt: Prompt = row["prompt"]
        # A column hides a role of a default name.
        values = {**responses, **row, "prompt": text_of(prompt)}
        if responses:
            values["response"] = [*responses.values()][-1]
            values["responses"] = "\n\n".join(responses.values())
        text = fill(template, values)  # Eq. 3
        return text if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": text}]
