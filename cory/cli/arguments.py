"""Command lines: `--help` shows the module's docstring verbatim, mistakes raise a UserError."""

from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter
from jsonargparse.typing import register_type

from cory.cli.messages import explained
from cory.errors import UserError

if TYPE_CHECKING:
    Verbatim: TypeAlias = Any
else:

    class Verbatim:
        """The type of a value that stays as the file has it.

        With `Any`, a text is read as YAML once more, and the prompt `Question: {prompt}` becomes a mapping.
        """

    register_type(Verbatim, serializer=lambda value: value, deserializer=lambda value: value)


class _Help(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the line breaks of the description."""


class Arguments(ArgumentParser):
    """The parser of a command: `--help` shows `description`, its module's docstring, verbatim."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            exit_on_error=False, allow_abbrev=False, description=description, formatter_class=_Help
        )

    def of(self, argv: Sequence[str] | None = None) -> Any:
        """Parses a command line; None: that of the process. Raises a UserError on mistakes."""
        allow_bare_flags(self)
        positional = [
            f"{action.dest.upper()}{' ...' * (action.nargs == '+')}"
            for action in self._get_positional_actions()
        ]
        self.usage = " ".join(["%(prog)s", *positional, "[--KEY VALUE ...]"])
        try:
            return self.instantiate(self.parse_args(argv))
        except ArgumentError as error:
            raise UserError(
                explained(str(error), [action.dest for action in self._actions])
            ) from None


def allow_bare_flags(parser: ArgumentParser) -> None:
    """Lets a boolean flag alone, such as `--overwrite`, mean `--overwrite true`."""
    for action in parser._actions:
        if getattr(action, "_typehint", None) is bool:
            action.nargs = "?"
            action.const = True
