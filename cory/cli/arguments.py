"""Command lines: `--help` shows the module's docstring verbatim, mistakes raise a UserError."""

import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from jsonargparse import (
    ArgumentError,
    ArgumentParser,
    DefaultHelpFormatter,
    set_parsing_settings,
)
from jsonargparse.typing import register_type

from cory.cli import invocation
from cory.cli.messages import explained
from cory.config import Settings
from cory.errors import UserError

# No value names code: by default, one that may be of any type and has a `class_path` is called. This counts for all
# parsers of a process.
set_parsing_settings(instantiate_subclass_spec_in_any=False, import_path_denylist=["*"])

if TYPE_CHECKING:
    Verbatim: TypeAlias = Any
else:

    class Verbatim:
        """The type of a value that stays as the file has it.

        With `Any`, a text is read as YAML once more, and the prompt `Question: {prompt}` becomes a mapping.
        """

    register_type(Verbatim, serializer=lambda value: value, deserializer=lambda value: value)


class Help(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the line breaks of the description."""


class Arguments(ArgumentParser):
    """The parser of a command: `--help` shows `description`, its module's docstring, verbatim."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            exit_on_error=False, allow_abbrev=False, description=description, formatter_class=Help
        )

    def of(self, argv: Sequence[str] | None = None) -> Any:
        """Parses a command line; None: that of the process. Raises a UserError on mistakes."""
        allow_bare_flags(self)
        words, changes = _without_changes(self, sys.argv[1:] if argv is None else argv)
        positional = [
            f"{action.dest.upper()}{' ...' * (action.nargs == '+')}"
            for action in self._get_positional_actions()
        ]
        self.prog = invocation.command()
        self.usage = " ".join(["%(prog)s", *positional, "[--KEY VALUE ...]"])
        try:
            parsed = self.instantiate(self.parse_args(words))
        except ArgumentError as error:
            raise UserError(
                explained(str(error), [action.dest for action in self._actions])
            ) from None
        for block, texts in changes.items():
            parsed[block] = {**parsed[block], **texts}
        return parsed


def allow_bare_flags(parser: ArgumentParser) -> None:
    """Lets a boolean flag alone, such as `--ppo.whiten_rewards`, mean `--ppo.whiten_rewards true`."""
    for action in parser._actions:
        if getattr(action, "_typehint", None) is bool:
            action.nargs = "?"
            action.const = True


def _without_changes(
    parser: ArgumentParser, argv: Sequence[str]
) -> tuple[list[str], dict[str, dict[str, str]]]:
    """The command line without `--task.KEY VALUE` and the like, and these: texts by key, for each of the mappings.

    The parser, which does not know the keys of a mapping, would read the prompt `Question: {prompt}` as one more
    mapping. `typed` makes values of the texts.
    """
    changes: dict[str, dict[str, str]] = {}
    for action in parser._actions:
        if getattr(action, "_typehint", None) == dict[str, Any]:
            action._typehint = dict[str, Verbatim]  # type: ignore[attr-defined]
            changes[action.dest] = {}

    kept = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        block, _, key = flag.removeprefix("--").partition(".")
        if not (flag.startswith("--") and key and block in changes):
            kept.append(word)
            continue
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise UserError(f"{block}.{key}: expected a value, got none")
        changes[block][key] = value
    return kept, changes


def typed(block: type[Settings], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes to a block of settings, from a command line, with values of the types of their keys.

    An unknown key and a value of another type are left as they are; `changed` refuses them.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(block)
    values = dict(changes)
    for key, value in changes.items():
        with suppress(ArgumentError):
            values[key] = parser.parse_object({key: value}, defaults=False)[key]
    return values
