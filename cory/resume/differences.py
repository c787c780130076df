"""What may differ between a run and its continuation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cory.config import FREE as FREE_SETTINGS
from cory.config import AgentConfig

# Keys of config.yaml that may differ on resume.
# Of the date, that of the first start is kept; models are compared by cory/identity.py.
FREE = frozenset({*FREE_SETTINGS, "date", "versions", "fingerprint.models"})

# Hashes of reward functions, and what has their names.
REWARDS = {
    "fingerprint.reward_sha256": "reward",
    "fingerprint.team_reward_sha256": "team_reward",
}
DATA = ("fingerprint.dataset_sha256", "fingerprint.rows")
HELD_OUT = "fingerprint.held_out_sha256"


class Difference(NamedTuple):
    """A key of config.yaml, dotted, and its values in two runs; as a text "key: old -> new"."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def differences(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], free_keys: frozenset[str] = FREE
) -> Iterator[Difference]:
    """Differences of the config.yaml of two runs, in what matters: all keys but those of `free_keys`.

    Fingerprints count only if both have one.
    """
    free = set(free_keys)
    if saved.get("ppo", {}).get("schedule", "constant") != "constant":
        free.remove("iterations")
    fingerprints = [settings.get("fingerprint") or {} for settings in (saved, wanted)]
    if not all(fingerprints):
        free.add("fingerprint")
    # Held-out rewards are compared with earlier ones only for patience.
    has_patience = wanted.get("guards", {}).get("patience") is not None
    if not (has_patience and all("held_out_sha256" in each for each in fingerprints)):
        free.add(HELD_OUT)
    yield from _different_keys(saved, wanted, free, "")


def in_words(
    changes: Sequence[Difference], saved: Mapping[str, Any], wanted: Mapping[str, Any]
) -> list[str]:
    """Differences as a message has them: where only the content of a file differs, its name in place of hashes.

    Args:
        changes: those of `differences`. saved, wanted: of the two runs, as there.
    """
    texts = []
    for change in changes:
        if change.key in REWARDS:
            texts += _changed_rewards(change.key, saved["fingerprint"], wanted["fingerprint"])
        elif change.key == DATA[0]:
            name = (wanted.get("task") or {}).get("dataset") or "of the task"
            texts.append(f"the training data {name} has changed")
        elif change.key == DATA[1]:
            texts.append(str(change._replace(key="its rows")))
        elif change.key == HELD_OUT:
            texts.append(
                "the held-out queries, whose rewards guards.patience compares, have changed"
            )
        else:
            texts.append(str(change))
    return texts


def _changed_rewards(key: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The reward functions of one name whose source has changed; of other functions the names are listed anyway."""
    name_key = REWARDS[key]
    if saved.get(name_key) != wanted.get(name_key):
        return []
    names = str(saved[name_key]).split(" + ")
    hash_key = key.removeprefix("fingerprint.")
    old = str(saved[hash_key]).split("+")
    new = str(wanted[hash_key]).split("+")
    changed = [name for name, a, b in zip(names, old, new, strict=True) if a != b]
    title = name_key.replace("_", " ")
    texts = []
    for name in changed:
        file, colon, _ = name.rpartition(" * ")[2].partition(":")
        beside = " or a file beside it that it imports," if colon else ""
        texts.append(f"the source of the {title}, {file},{beside} has changed")
    return list(dict.fromkeys(texts))


def _different_keys(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], free: set[str], prefix: str
) -> Iterator[Difference]:
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
            yield Difference(name, old, new)


def _without_devices(entries: Sequence[Mapping[str, Any]]) -> list[AgentConfig]:
    """The entries of `agents` without their devices; empty if nothing is left of any of them."""
    agents = [AgentConfig(**{**entry, "device": None}) for entry in entries]
    return agents if any(agent != AgentConfig() for agent in agents) else []
