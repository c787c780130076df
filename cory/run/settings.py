"""The settings of a run, config.yaml, and which may differ when it continues. Importing this does not import torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cory.cli.yaml_file import read_yaml
from cory.config import AgentConfig
from cory.errors import UserError

# How a run computes, which changes its numbers by rounding alone.
ROUNDING = frozenset({"device", "ppo.micro_batch", "model.gradient_checkpointing"})
# What may differ when a run continues: how far it goes (with a constant learning rate), where, and who watches.
FREE = ROUNDING | {
    "iterations",
    "output",
    "resume",
    "tracker",
    "checkpoint",
    "sample_every",
    "sampling.engine_url",
    "versions",
    "fingerprint.models",  # compared by `cory.identity.check_models`
}
LINE_BREAKS = "\x85\u2028\u2029"  # which YAML reads as spaces or other line breaks


def read_settings(run: Path) -> dict[str, Any]:
    """A run's config.yaml: settings, fingerprint, versions. Nothing in it is executed.

    Raises a UserError if there is none, or if it names code.
    """
    try:
        settings = read_yaml(run / "config.yaml")
    except (OSError, UnicodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"expected the folder of a run, with a config.yaml, got {str(run)!r} ({reason})"
        ) from None
    if not isinstance(settings, dict):
        raise UserError(f"{run / 'config.yaml'}: expected settings, got {settings!r}")
    return settings


def named(folder: Path) -> Path:
    """The folder by a path that ends with its name: not `.` or `..`."""
    return folder if folder.name not in ("", "..") else folder.resolve()


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines, such as prompts, as blocks, and quotes what the configuration's loader would read
    as something else.
    """


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if _is_number(text) or not text.strip("\n") or any(each in text for each in LINE_BREAKS):
        style = '"'
    elif "\n" in text.strip("\n"):
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_number(text: str) -> bool:
    """Such as 1e3, which is text in YAML and a number to its loader here."""
    try:
        float(text)
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _text)


def yaml_text(settings: Mapping[str, Any]) -> str:
    """Settings as YAML for people to read, in their order."""
    return yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def differences(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], free: frozenset[str] = FREE
) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which the config.yaml of two runs differ, but for those of `free`, with both values.

    What identifies data and rewards (`fingerprint`) counts where both have it.
    """
    if saved.get("ppo", {}).get("schedule", "constant") != "constant":
        free = free - {"iterations"}
    return _different_keys(saved, wanted, free, "")


def _different_keys(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], free: frozenset[str], prefix: str
) -> dict[str, tuple[Any, Any]]:
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
            found |= _different_keys(old, new, free, f"{name}.")
        elif old != new:
            found[name] = (old, new)
    return found


def _without_devices(entries: Sequence[Mapping[str, Any]] | None) -> list[AgentConfig]:
    """The entries of `agents` without their devices; empty if nothing is left of any of them."""
    agents = [AgentConfig(**{**entry, "device": None}) for entry in entries or []]
    return agents if any(agent != AgentConfig() for agent in agents) else []
