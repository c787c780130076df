"""The settings of a run, config.yaml, and which may differ when it continues. Importing this does not import torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cory.config import AgentConfig
from cory.errors import UserError
from cory.settings import read_yaml

# What may differ when a run continues: how it computes, which changes its numbers by rounding alone; how far it goes,
# where, and who watches; what config.yaml holds besides settings.
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
        "date",  # that of the first start is kept
        "fingerprint.models",  # compared by `cory.identity.check_models`
    }
)


def read_settings(run: Path) -> dict[str, Any]:
    """A run's config.yaml: settings, fingerprint, versions. Nothing in it is executed.

    Raises a UserError if there is none, or if it names code.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise UserError(f"expected the folder of a run, with a config.yaml, got {str(run)!r}")
    return read_yaml(file)


def named(folder: Path) -> Path:
    """The folder by a path that ends with its name: not `.` or `..`."""
    return folder if folder.name not in ("", "..") else folder.resolve()


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted keys."""
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
    """The dotted keys in which the config.yaml of two runs differ, but for those of `free`, with both values.

    What identifies data and rewards (`fingerprint`) counts where both have it.
    """
    found: dict[str, tuple[Any, Any]] = {}
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
            found |= differences(old, new, free, f"{name}.")
        elif old != new:
            found[name] = (old, new)
    return found


def _without_devices(entries: Sequence[Mapping[str, Any]] | None) -> list[AgentConfig]:
    """The entries of `agents` without their devices; empty if nothing is left of any of them."""
    agents = [AgentConfig(**{**entry, "device": None}) for entry in entries or []]
    return agents if any(agent != AgentConfig() for agent in agents) else []
