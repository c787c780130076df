"""Checked settings: dataclasses that refuse unknown names and values of another type, and their errors."""

import difflib
import math
import types
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints


class UserError(Exception):
    """An error that the user can fix: the message says what was expected, given and where. Shown without traceback."""


class RewardError(UserError):
    """An error of a reward function: once that is mended, the run continues with `--accept_changes reward`."""


def expect(ok: bool, where: str, expected: str, came: Any) -> None:
    """Raises the UserError "WHERE: expected EXPECTED, got CAME" unless `ok`."""
    if not ok:
        raise UserError(f"{where}: expected {expected}, got {came!r}")


def one_of(where: str, known: Sequence[str], came: Any) -> None:
    """Raises a UserError that lists the known names unless `came` is one of them.

    For functions that take a name: without it, an unknown one would be taken for the last of the known ones.
    """
    expect(came in known, where, f"one of {', '.join(known)}", came)


def positive(block: str, settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value not in (None, "auto"):  # a key whose type has neither refuses them where they are assigned
            expect(value > 0 and math.isfinite(value), f"{block}.{name}", "a number above 0", value)


def between(block: str, settings: Any, low: float, high: float, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        expect(low <= value <= high, f"{block}.{name}", f"a number from {low:g} to {high:g}", value)


S = TypeVar("S", bound="Settings")


@dataclass
class Settings:
    """A block of settings. An unknown name, or a value of another type, is refused where it is assigned."""

    def __setattr__(self, name: str, value: Any) -> None:
        hints = get_type_hints(type(self))
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else f", which has {', '.join(hints)}"
            raise UserError(f"{type(self).__name__}: unknown key {name!r}{hint}")
        kind = hints[name] if get_origin(hints[name]) else hints[name].__name__
        expected = str(kind).replace("typing.", "").replace("NoneType", "None")
        expect(_fits(value, hints[name]), f"{type(self).__name__}.{name}", expected, value)
        object.__setattr__(self, name, value)

    def check(self) -> None:
        """Checks ranges and combinations again, for settings that were assigned since. Raises a UserError."""
        for value in vars(self).values():
            if isinstance(value, Settings):
                value.check()
        getattr(self, "__post_init__", lambda: None)()


def changed(block: S, changes: Mapping[str, Any]) -> S:
    """A block of settings with some of them changed. Raises a UserError on unknown keys."""
    block = copy(block)
    for key, value in changes.items():
        setattr(block, key, value)
    block.check()
    return block


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has a field's type. An int will do for a float; a bool is no number."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in parts)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, parts[0]) for each in value)
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def is_local(name: str) -> bool:
    """Whether a name can only be that of a file or folder, as no id on the Hub looks like it."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def keys(config_class: type, prefix: str = "") -> list[str]:
    """Every key of a configuration, dotted: `seed`, `ppo.batch_size`, ..."""
    found = []
    for name, kind in get_type_hints(config_class).items():
        nested = isinstance(kind, type) and issubclass(kind, Settings)
        found += keys(kind, f"{prefix}{name}.") if nested else [prefix + name]
    return found
