"""Settings as data: blocks of keys, how they are read from YAML and merged, and what is refused.

A configuration is data: nothing that it names is imported or run. Importing this does not import torch.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from cory.errors import UserError

S = TypeVar("S", bound="Settings")
UNKNOWN = ("no_such_attribute", "unexpected_keyword_argument")  # pydantic's errors about keys
# What a run's config.yaml holds beside its settings.
BESIDE_SETTINGS = ("date", "versions", "fingerprint")
UNREADABLE = (yaml.YAMLError, TypeError, ValueError, RecursionError)
LINE_BREAKS = "\x85\u2028\u2029"  # which YAML reads as spaces or other line breaks
INT = re.compile(r"[-+]?\d+(_\d+)*$")
FLOAT = re.compile(
    r"[-+]?(\.\d+|\d[\d_]*(\.[\d_]*)?)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


@dataclass(
    config=ConfigDict(strict=True, extra="forbid", validate_assignment=True, allow_inf_nan=False)
)
class Settings:
    """A block of settings. Subclasses are pydantic dataclasses, too, and inherit that they are strict.

    Attributes:
        block: the block's name in a configuration, for messages; empty for the top level.
    """

    block: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, values: Any, validate: Any) -> Any:
        """Makes a UserError of what pydantic refuses in Python code: a class that is called, a value that is assigned.

        Part of a larger configuration, a block leaves it to that, which knows the whole key.
        """
        try:
            return validate(values)
        except ValidationError as error:
            if isinstance(values, ArgsKwargs | Settings):
                raise UserError(refusal(cls, error)) from None
            raise

    def check(self) -> None:
        """Checks combinations of keys. Raises a UserError."""
        for name in blocks(type(self)):
            getattr(self, name).check()


# Blocks and their keys


def changed(block: S, changes: Mapping[str, Any]) -> S:
    """A block of settings with some of them changed. Raises a UserError on unknown keys."""
    block = replace(block, **changes)
    block.check()
    return block


def blocks(settings: type[Settings]) -> dict[str, type[Settings]]:
    """The keys of a class that hold blocks of settings, and their classes."""
    hints = get_type_hints(settings)
    types = {field.name: hints[field.name] for field in fields(settings)}
    return {
        name: kind
        for name, kind in types.items()
        if isinstance(kind, type) and issubclass(kind, Settings)
    }


def keys(settings: type[Settings], prefix: str = "") -> dict[str, Any]:
    """Every key of a configuration, dotted, with its type: `seed`, `ppo.batch_size`, ..."""
    nested = blocks(settings)
    hints = get_type_hints(settings)
    types: dict[str, Any] = {}
    for field in fields(settings):
        if field.name in nested:
            types |= keys(nested[field.name], f"{prefix}{field.name}.")
        else:
            types[prefix + field.name] = hints[field.name]
    return types


# From values to settings


def from_data(kind: type[S], values: Mapping[str, Any]) -> S:
    """Settings from what a file says. Raises a UserError by the dotted key, such as `agents.0.learning_rate`."""
    try:
        # As JSON, of which pydantic takes mappings for blocks while it stays strict about the values.
        return TypeAdapter(kind).validate_json(json.dumps(values))
    except ValidationError as error:
        raise UserError(refusal(kind, error)) from None


def from_dotted(kind: type[S], values: Mapping[str, Any]) -> S:
    """Settings from values by their dotted keys, unchecked; `from_data` otherwise."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *names, last = key.split(".")
        block = nested
        for name in names:
            block = block.setdefault(name, {})
            if not isinstance(block, dict):
                raise UserError(unknown_key(key, list(keys(kind))))
        block[last] = value
    return from_data(kind, nested)


def as_config(kind: type[S], settings: Mapping[str, Any], where: Path) -> S:
    """The settings of a file, checked like a command line. Raises a UserError if they are not those of `kind`."""
    try:
        config = from_dotted(kind, dotted(kind, settings))
        config.check()
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return config


def dotted(kind: type[Settings], settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys. What stands where a block belongs, and is none, is refused later."""
    inner = blocks(kind)
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if "." in str(key):
            raise UserError(
                f"{name}: unknown key. In a file, the keys of a block stand below its name"
            )
        if key in inner and isinstance(value, Mapping):
            flat |= dotted(inner[key], value, f"{name}.")
        elif name not in BESIDE_SETTINGS:
            flat[name] = value
    return flat


# What is refused


def refusal(kind: type[Settings], error: ValidationError) -> str:
    """The first thing that pydantic refuses, in its words: the dotted key, the sentence, the value that came."""
    errors = error.errors()
    unknown = [each for each in errors if each["type"] in UNKNOWN]
    if unknown:
        key, block = _key(kind, unknown[0]["loc"])
        prefix = key.rpartition(".")[0]
        beside = [f"{prefix}.{field.name}".lstrip(".") for field in fields(block)]
        return unknown_key(key, [*beside, *keys(kind)])

    first = errors[0]
    key = _key(kind, first["loc"])[0]
    if first["type"].startswith("missing"):
        return f"{key}: {first['msg']}"
    # A key that takes several types has an error for each of them.
    of_the_key = [
        other["msg"].removeprefix("Value error, ")  # before what our own validators say
        for other in errors
        if _key(kind, other["loc"])[0] == key
    ]
    return f"{key}: {' or '.join(dict.fromkeys(of_the_key))}, got {first['input']!r}"


def _key(kind: type[Settings], location: Sequence[str | int]) -> tuple[str, type[Settings]]:
    """The dotted key of a location in settings, and the class of the block that it is in."""
    parts = [kind.block] if kind.block else []
    block: type[Settings] = kind
    hint: Any = kind
    for part in location:
        if isinstance(hint, type) and issubclass(hint, Settings):
            block = hint
            name = fields(block)[part].name if isinstance(part, int) else part  # given by position
            hint = get_type_hints(block).get(name)
        elif get_origin(hint) in (list, dict):
            name = str(part)
            hint = get_args(hint)[-1]
        else:  # one of several types
            break
        parts.append(name)
    return ".".join(parts), block


def unknown_key(key: str, known: Sequence[str]) -> str:
    """The message about an unknown key, with the nearest one: by its name without the block, or by its spelling."""
    if of_block := [name for name in known if name.startswith(f"{key}.")]:
        return f"{key}: expected the keys of this block, each by itself, such as {of_block[0]}"
    word = key.lower().replace("-", "_")
    name = word.rpartition(".")[2]
    whole = {key: key for key in known}
    names = {key.rpartition(".")[2]: key for key in reversed(known)}  # of several, the first
    for candidates, wanted, likeness in (
        (names, name, 1.0),
        (whole, word, 0.7),
        (names, name, 0.7),
    ):
        if near := difflib.get_close_matches(wanted, candidates, n=1, cutoff=likeness):
            return f"{key}: unknown key. Did you mean {candidates[near[0]]!r}?"
    return f"{key}: unknown key. --help lists the keys"


# YAML


class _Loader(yaml.SafeLoader):
    """Reads decimal numbers alone: 010 is 10, 1e-4 a number; 0x1F, 1:30 and dates are texts. Refuses a key that
    stands twice in a block.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        letter: [rule for rule in rules if not rule[0].endswith((":int", ":float", ":timestamp"))]
        for letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if str(key.value) in names:
                raise yaml.composer.ComposerError(
                    None, None, f"{key.value}: stands twice", key.start_mark
                )
            names.add(str(key.value))
        return node


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines, such as prompts, as blocks, and quotes what would not be read as text."""


_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver("tag:yaml.org,2002:int", INT, [*"-+0123456789"])
    _each.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, [*"-+.0123456789"])


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if not text.strip("\n") or any(each in text for each in LINE_BREAKS):
        style = '"'
    elif "\n" in text.strip("\n"):
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)


def yaml_text(settings: Mapping[str, Any]) -> str:
    """Settings as YAML for people to read, in their order."""
    return yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str) -> Any:
    """What a YAML text says, of what JSON has, too. Raises one of UNREADABLE."""
    content = yaml.load(text, _Loader)
    json.dumps(content)
    return content


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds. Raises a UserError: it cannot be read, or a key stands twice in a block."""
    try:
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{file}{line}: {error.problem}") from None
    except (OSError, *UNREADABLE) as error:
        raise UserError(f"{file}: expected a readable YAML file, got {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a mapping of keys to values, got {content!r}")
    return content
