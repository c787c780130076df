"""`--help` of a configuration: what its classes say about their keys. Importing this does not
import torch.

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
from cory.errors import UserError

WIDTH = 80
COLUMN = 28  # characters of a flag on the first screen
COMMON = (
    "seed", "iterations", "algorithm", "output", "resume", "model.name", "lora.rank", "cory.num_agents",
    "ppo.learning_rate", "ppo.batch_size", "ppo.init_kl_coef", "sampling.max_new_tokens",
    "task.dataset", "task.reward",
)  # fmt: skip


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
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    )


def help_text(
    program: str, settings: Settings, default: Path | None, topic: str = "", about: str = ""
) -> str:
    """What `--help TOPIC` prints.

    Args:
        settings: with the defaults. default: the configuration file that is read if none is named.
        topic: empty: usage, common keys and the names of the blocks; a block's name: its keys;
            `all`: every key.
        about: the text of the script.

    Raises a UserError if there is no such topic.
    """
    named = {prefix.removesuffix("."): block for prefix, block in _blocks(settings)}
    topics = [*filter(None, named), "all"]
    if not topic:
        return "\n".join(_first_screen(program, settings, default, about))
    if topic not in topics:
        raise UserError(f"help: expected one of {', '.join(topics)}, got {topic!r}")
    lines: list[str] = []
    for name, block in named.items():
        if topic in ("all", name):
            lines += ["", *_block_help(name, block)]
    return "\n".join(lines[1:])


def _first_screen(program: str, settings: Settings, default: Path | None, about: str) -> list[str]:
    lines = [f"usage: {program} [--config FILE] [--KEY VALUE ...]", ""]
    if about:
        lines += [about.strip(), ""]
    file = (
        f"YAML file with settings (default: {default.name})"
        if default
        else "YAML file with settings"
    )
    lines += [
        "Common keys, in the file or as flags, which count more:",
        *_short_entry("--config FILE", file),
    ]
    for key, text, value in _entries(settings):
        if key in COMMON:
            lines += _short_entry(
                f"--{key}", f"{_first_sentence(text)} (default: {default_text(value)})"
            )
    lines += [
        *_short_entry("--print_config", "Print all settings, and exit"),
        "",
        "All keys:",
        *_short_entry("--help all", "Every key of this command"),
    ]
    for prefix, block in _blocks(settings):
        if prefix:
            lines += _short_entry(
                f"--help {prefix.removesuffix('.')}", _first_sentence(documented(type(block))[0])
            )
    return lines


def _block_help(name: str, block: Settings) -> list[str]:
    """The summary of a block, or of the top level, and its keys."""
    summary, _ = documented(type(block))
    lines = textwrap.wrap(f"{name}: {summary}" if name else summary, WIDTH)
    texts = _texts(type(block))
    hints = get_type_hints(type(block))
    for field in fields(block):
        value = getattr(block, field.name)
        if not isinstance(value, Settings):
            prefix = f"{name}." if name else ""
            flag = f"--{prefix}{field.name} {_choices(hints[field.name])}".rstrip()
            lines += _entry(flag, f"{texts[field.name]} (default: {default_text(value)})")
    return lines


def _entries(settings: Settings) -> Iterator[tuple[str, str, object]]:
    """Every key with its documentation and its default."""
    for prefix, block in _blocks(settings):
        texts = _texts(type(block))
        for field in fields(block):
            value = getattr(block, field.name)
            if not isinstance(value, Settings):
                yield prefix + field.name, texts[field.name], value


def _first_sentence(text: str) -> str:
    """Without its full stop; "Eq." does not end one."""
    return re.split(r"(?<!Eq)\.(?= |$)", text)[0]


def _short_entry(flag: str, text: str) -> list[str]:
    """A flag with its text beside it."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {flag:{COLUMN}}", subsequent_indent=" " * (COLUMN + 2)
    )


def _blocks(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """The top level and the blocks, each with what its keys begin with."""
    yield "", settings
    for field in fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Settings):
            yield f"{field.name}.", value


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
    return [
        f"  {flag}",
        *textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6),
    ]
