"""Reads a run's settings (config.yaml) and compares the settings of two runs. Does not import torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cory.config import AgentConfig
from cory.errors import UserError
from cory.settings import read_yaml

# Keys that may differ when a run continues. Some set how the run computes, which changes numbers only by rounding;
# others set its length and outputs. The last three are entries of config.yaml that are not settings.
FREE = frozenset(
    {
        "device",
        "ppo.micro_batch",
        "model.gradient_checkpointing",
        "iterations",
        "output",
        "resume",
        "tracker",
        "checkpoint",
        "sample_every",
        "sampling.engine_url",
        "versions",
        "date",  # the date of the first start is kept
        "fingerprint.models",  # compared by `cory.identity.check_models`
    }
)


def read_settings(run: Path) -> dict[str, Any]:
    """Reads a run's config.yaml: settings, fingerprint, versions. Executes nothing.

    Raises a UserError if the file is missing or unreadable.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise UserError(f"expected a run's folder, with a config.yaml, got {str(run)!r}")
    return read_yaml(file)


def named(folder: Path) -> Path:
    """Returns a path that ends with the folder's name, instead of `.` or `..`."""
    return folder if folder.name not in ("", "..") else folder.resolve()


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted keys."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result


def differences(
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    free: frozenset[str] = FREE,
    prefix: str = "",
) -> dict[str, tuple[Any, Any]]:
    """Returns the dotted keys in which two runs' config.yaml differ, with both values; keys in `free` are ignored.

    Entries of `fingerprint`, which identify data and rewards, are compared only if both runs have them.
    """
    changes: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*saved, *wanted]):
        name = f"{prefix}{key}"
        old = saved.get(key)
        new = wanted.get(key)
        if name in free or ((old is None or new is None) and name.startswith("fingerprint")):
            continue
        if name == "agents":
            old = _without_devices(old)
            new = _without_devices(new)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= differences(old, new, free, f"{name}.")
        elif old != new:
            changes[name] = (old, new)
    return changes


def _without_devices(entries: Sequence[Mapping[str, Any]] | None) -> list[AgentConfig]:
    """Returns the entries of `agents` without devices, or an empty list if they set nothing else."""
    agents = [AgentConfig(**{**entry, "device": None}) for entry in entries or []]
    return agents if any(agent != AgentConfig() for agent in agents) else []
