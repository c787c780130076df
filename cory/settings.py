"""Blocks of settings, read from YAML, merged and validated.

Reading a configuration runs no code. Importing this module does not import torch.
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
# Keys in a run's config.yaml that are not settings.
BESIDE_SETTINGS = ("date", "versions", "fingerprint")
UNREADABLE = (yaml.YAMLError, TypeError, ValueError, RecursionError)
LINE_BREAKS = "\x85\u2028\u2029"  # YAML would read these as other characters if unquoted
INT = re.compile(r"[-+]?\d+(_\d+)*$")
FLOAT = re.compile(
    r"[-+]?(\.\d+|\d[\d_]*(\.[\d_]*)?)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


@dataclass(
    config=ConfigDict(strict=True, extra="forbid", validate_assignment=True, allow_inf_nan=False)
)
class Settings:
    """A block of settings. Subclasses are pydantic dataclasses and inherit its strict validation.

    Attributes:
        block: the block's name in a configuration, for messages; empty for the top level.
    """

    block: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, values: Any, validate: Any) -> Any:
        """Converts a ValidationError to a UserError if Python code has called the class or assigned a value.

        A block inside a configuration raises the ValidationError, since only the configuration knows the full key.
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
    """Returns a block with some settings changed. Raises a UserError for invalid changes."""
    block = replace(block, **changes)
    block.check()
    return block


def blocks(settings: type[Settings]) -> dict[str, type[Settings]]:
    """Returns the keys that hold blocks of settings, with their classes."""
    hints = get_type_hints(settings)
    types = {field.name: hints[field.name] for field in fields(settings)}
    return {
        name: kind
        for name, kind in types.items()
        if isinstance(kind, type) and issubclass(kind, Settings)
    }


def keys(settings: type[Settings], prefix: str = "") -> dict[str, Any]:
    """Returns the type of every dotted key: `seed`, `ppo.batch_size`, ..."""
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
    """Makes settings from a file's content. A UserError names the dotted key, such as `agents.0.learning_rate`."""
    try:
        # When it reads JSON, pydantic accepts mappings as blocks and is still strict about values.
        return TypeAdapter(kind).validate_json(json.dumps(values))
    except ValidationError as error:
        raise UserError(refusal(kind, error)) from None


def from_dotted(kind: type[S], values: Mapping[str, Any]) -> S:
    """Makes settings from values by dotted key, like `from_data`."""
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
    """Makes settings from a file's content, and checks combinations. Raises a UserError if they do not fit `kind`."""
    try:
        config = from_dotted(kind, dotted(kind, settings))
        config.check()
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return config


def dotted(kind: type[Settings], settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted keys. A plain value in place of a block is kept; later code refuses it."""
    inner = blocks(kind)
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if "." in str(key):
            raise UserError(
                f"{name}: unknown key. In a file, write a block's keys below the block's name"
            )
        if key in inner and isinstance(value, Mapping):
            flat |= dotted(inner[key], value, f"{name}.")
        elif name not in BESIDE_SETTINGS:
            flat[name] = value
    return flat


# Error messages


def refusal(kind: type[Settings], error: ValidationError) -> str:
    """Returns the message for pydantic's first error: the dotted key, pydantic's text, and the value."""
    errors = error.errors()
    unknown = [detail for detail in errors if detail["type"] in UNKNOWN]
    if unknown:
        key, block = _key(kind, unknown[0]["loc"])
        prefix = key.rpartition(".")[0]
        siblings = [f"{prefix}.{field.name}".lstrip(".") for field in fields(block)]
        return unknown_key(key, [*siblings, *keys(kind)])

    first = errors[0]
    key = _key(kind, first["loc"])[0]
    if first["type"].startswith("missing"):
        return f"{key}: {first['msg']}"
    # If a key allows several types, pydantic reports an error for each of them.
    messages = [
        detail["msg"].removeprefix("Value error, ")  # pydantic's prefix to our validators' messages
        for detail in errors
        if _key(kind, detail["loc"])[0] == key
    ]
    return f"{key}: {' or '.join(dict.fromkeys(messages))}, got {first['input']!r}"


def _key(kind: type[Settings], location: Sequence[str | int]) -> tuple[str, type[Settings]]:
    """Converts a location in pydantic's error to a dotted key. Returns it with the class of the key's block."""
    parts = [kind.block] if kind.block else []
    block: type[Settings] = kind
    hint: Any = kind
    for part in location:
        if isinstance(hint, type) and issubclass(hint, Settings):
            block = hint
            # An integer is the index of a positional argument.
            name = fields(block)[part].name if isinstance(part, int) else part
            hint = get_type_hints(block).get(name)
        elif get_origin(hint) in (list, dict):
            name = str(part)
            hint = get_args(hint)[-1]
        else:  # the rest names one of the key's several types
            break
        parts.append(name)
    return ".".join(parts), block


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Returns the message for an unknown key. It suggests a key of that name in another block, or a similar key."""
    if block_keys := [name for name in known if name.startswith(f"{key}.")]:
        return f"{key}: expected single keys of this block, such as {block_keys[0]}"
    word = key.lower().replace("-", "_")
    name = word.rpartition(".")[2]
    whole = {key: key for key in known}
    # Among keys of the same name, the first one wins.
    names = {key.rpartition(".")[2]: key for key in reversed(known)}
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
    """Reads only decimal numbers as numbers: 010 is 10 and 1e-4 is a number, while 0x1F, 1:30 and dates are texts.

    Raises an error if a key occurs twice in a block.
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
                    None, None, f"{key.value}: expected once in a block, got twice", key.start_mark
                )
            names.add(str(key.value))
        return node


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and quotes texts that would otherwise be read as another type."""


_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:int", INT, [*"-+0123456789"])
    _class.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, [*"-+.0123456789"])


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if not text.strip("\n") or any(character in text for character in LINE_BREAKS):
        style = '"'
    elif "\n" in text.strip("\n"):
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)


def yaml_text(settings: Mapping[str, Any]) -> str:
    """Returns settings as readable YAML, in their order."""
    return yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str) -> Any:
    """Parses YAML whose content JSON can express. Raises one of UNREADABLE otherwise."""
    content = yaml.load(text, _Loader)
    json.dumps(content)
    return content


def read_yaml(file: Path) -> dict[str, Any]:
    """Reads the mapping in a YAML file. Raises a UserError if it is unreadable, or a key occurs twice in a block."""
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
