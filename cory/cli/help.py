"""`--help` of a configuration: what its classes say about their keys. Importing this does not import torch.

The parser's own help would take longer than everything else that `--help` needs.
"""

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from cory.config import Settings

WIDTH = 100


def documented(settings: type[Settings]) -> tuple[str, dict[str, str]]:
    """A class's summary and the documentation of its own keys, from its docstring."""
    summary, _, args = (inspect.getdoc(settings) or "").partition("\nArgs:\n")
    keys: dict[str, str] = {}
    name = ""
    for line in args.splitlines():
        if match := re.match(r" {4}(\w+): (.*)", line):
            name = match[1]
            keys[name] = match[2]
        elif line.strip():
            keys[name] += " " + line.strip()
    return " ".join(summary.split()), keys


def default_text(value: object) -> str:
    """A default as YAML, on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def help_text(program: str, settings: Settings, default: Path | None) -> str:
    """The keys of the top level first, then a group for each block."""
    file = f"YAML file of the run (default: {default.name})" if default else "YAML file of the run"
    lines = [
        f"usage: {program} [--config FILE] [--KEY VALUE ...]",
        "",
        *_entry("--config FILE", file),
        *_entry("--print_config", "Print all settings, and exit."),
        *_entry("--help", "Print this help, and exit."),
    ]
    for prefix, block in _blocks(settings):
        summary, _ = documented(type(block))
        lines += ["", f"{prefix.removesuffix('.')}: {summary}" if prefix else summary]
        texts = _texts(type(block))
        hints = get_type_hints(type(block))
        for each in fields(block):
            value = getattr(block, each.name)
            if not isinstance(value, Settings):
                flag = f"--{prefix}{each.name} {_choices(hints[each.name])}".rstrip()
                lines += _entry(flag, f"{texts[each.name]} (default: {default_text(value)})")
    return "\n".join(lines)


def _blocks(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """The top level and the blocks, each with what its keys begin with."""
    yield "", settings
    for each in fields(settings):
        value = getattr(settings, each.name)
        if isinstance(value, Settings):
            yield f"{each.name}.", value


def _texts(settings: type[Settings]) -> dict[str, str]:
    """The documentation of all keys of a class, also of those that it inherits."""
    texts: dict[str, str] = {}
    for parent in reversed(settings.__mro__):
        if issubclass(parent, Settings):
            texts |= documented(parent)[1]
    return texts


def _choices(hint: Any) -> str:
    """What a key takes, if it is one of several words."""
    if hint is bool:
        return "{true,false}"
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    return ""


def _entry(flag: str, text: str) -> list[str]:
    return [f"  {flag}", *textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]
