"""What may differ between a run and its continuation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cory.config import AgentConfig

# Keys of config.yaml that may differ on resume.
FREE = frozenset(
    {
        "iterations",  # unless the learning rate depends on it
        "output",
        "resume",
        "overwrite",
        "accept_changes",
        "tracker",
        "sample_every",
        "eval_every",
        "eval_queries",
        "callbacks",
        "task.metrics",
        "task.extract",
        "task.accepts",
        "checkpoint",
        "hub",
        "parallel",
        "sampling.engine",
        "sampling.engine_url",
        "sampling.engine_folder",
        "changes",
        "versions",
        "fingerprint.models",  # compared by cory/provenance/models.py
    }
)


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Differences of the config.yaml of two runs, in what matters: "key: saved -> wanted".

    Fingerprints count only if both have one.
    """
    free = set(FREE)
    if saved.get("ppo", {}).get("schedule", "constant") != "constant":
        free.remove("iterations")
    if not (saved.get("fingerprint") and wanted.get("fingerprint")):
        free.add("fingerprint")
    yield from _different_keys(saved, wanted, free, "")


def _different_keys(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], free: set[str], prefix: str
) -> Iterator[str]:
    for key in dict.fromkeys([*saved, *wanted]):
        name = f"{prefix}{key}"
        if name in free:
            continue
        old = saved.get(key)
        new = wanted.get(key)
        if name == "agents":  # together or apart, they learn the same
            old = _without_devices(old or [])
            new = _without_devices(new or [])
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _different_keys(old, new, free, f"{name}.")
        elif old != new:
            yield f"{name}: {old!r} -> {new!r}"


def _without_devices(entries: Sequence[Mapping[str, Any]]) -> list[AgentConfig]:
    """The entries of `agents` without their devices; empty if nothing is left of any of them."""
    agents = [AgentConfig(**{**entry, "device": None}) for entry in entries]
    return agents if any(agent != AgentConfig() for agent in agents) else []
