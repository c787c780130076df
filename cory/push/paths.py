"""Nothing of the machine is passed on: of absolute paths in settings and JSON files the last part is left."""

import re
from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import Any

# Keys that are left out.
OF_THE_MACHINE = ("output", "resume", "device", "tracker", "hub", "fingerprint", "versions")


def is_absolute(text: str) -> bool:
    """Whether a text is a path of some machine."""
    return text.startswith(("/", "~")) or PureWindowsPath(text).is_absolute()


def last_part(path: str) -> str:
    """The name of a file or folder, by a path of any system."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings without what is the machine's."""
    return {
        key: _shortened(key, value) for key, value in settings.items() if key not in OF_THE_MACHINE
    }


def _shortened(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {inner_key: _shortened(inner_key, inner) for inner_key, inner in value.items()}
    if isinstance(value, list):
        return [_shortened(key, item) for item in value]
    is_text = key.endswith("prompt") or key == "stop"  # which may begin with a slash
    if isinstance(value, str) and not is_text and is_absolute(value):
        return last_part(value)
    return value
