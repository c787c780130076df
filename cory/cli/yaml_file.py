"""YAML files are data: nothing that one names is imported or run. Importing this imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cory.errors import UserError

# The key by which jsonargparse has a class, or any function, imported and called.
NAMES_CODE = "class_path"


def read_yaml(file: Path) -> Any:
    """What a YAML file holds.

    Raises:
        UserError: a mapping in it names code.
        OSError, UnicodeError, yaml.YAMLError, RecursionError: it cannot be read, or one of YAML's tags names code.
    """
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    try:
        check_data(content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return content


def check_data(content: object) -> None:
    """Raises a UserError, by the key, if a mapping in the content of a file names code."""
    waiting = [("", content)]
    done = set()  # an alias may stand within what it names
    while waiting:
        key, value = waiting.pop()
        if id(value) in done:
            continue
        done.add(id(value))
        if isinstance(value, Mapping):
            for name, part in value.items():
                name = repr(name)[1:-1] if isinstance(name, str) else repr(name)
                if name == NAMES_CODE or name.endswith(f".{NAMES_CODE}"):
                    raise UserError(
                        f"{key or name}: expected no {NAMES_CODE}, as a configuration names no code, got {part!r}"
                    )
                waiting.append((f"{key}.{name}".lstrip("."), part))
        elif isinstance(value, list | tuple):
            waiting += [(f"{key}[{index}]", part) for index, part in enumerate(value)]
