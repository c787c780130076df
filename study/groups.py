"""Groups of runs that differ in their seed alone: which runs belong together, and what a group is called."""

import glob
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cory.config import ROUNDING
from cory.errors import UserError
from cory.run.settings import FREE, differences
from study.records import Record, flat, num_agents, num_roles

# Hash and length of a run's data. Queries may be drawn from the seed, as IMDB's are, so only runs of one seed compare.
DATA = ("fingerprint.dataset_sha256", "fingerprint.rows")
# Settings that do not make another group: as a run may change them when it continues, but for rounding, and what a run
# is watched by, and how its processes share the work.
UNRELATED = (FREE - ROUNDING) | {
    "callbacks",
    "eval_every",
    "eval_queries",
    "fingerprint.held_out_sha256",
    "parallel",
    "sampling.engine",
    "task.extract",
    "task.metrics",
}


class Group(NamedTuple):
    """The group of a run.

    Args:
        name: of the runs that differ in their seed alone.
        family: of the groups that differ in the key `over` alone. value: of that key; None if it has no effect.
    """

    name: str
    family: str
    value: Any


def find(patterns: Sequence[str]) -> list[Path]:
    """The runs' folders that paths and globs name, each once, sorted within a glob.

    Other files, such as logs, are skipped.

    Raises:
        UserError: a pattern matches no run.
    """
    folders: dict[Path, None] = {}
    for pattern in patterns:
        paths = (
            [Path(pattern)]
            if Path(pattern).is_dir()
            else [Path(name) for name in sorted(glob.glob(pattern))]
        )
        runs = [path for path in paths if (path / "config.yaml").is_file()]
        folders |= dict.fromkeys(runs)
        is_other_file = Path(pattern).is_file() and (folders or pattern != patterns[-1])
        if not runs and not is_other_file:
            raise UserError(
                f"runs: expected folders of runs (with a config.yaml), got {pattern!r}, which matches none"
            )
    return list(folders)


def group(
    runs: Sequence[Record], over: str | None = None, families: Sequence[str] | None = None
) -> list[Group]:
    """The group of each run, by their settings.

    Args:
        over: a dotted key whose values make groups of one family.
        families: a name for each run; default: from the settings.

    Raises:
        UserError: a run has no key `over`, or runs of one name differ in more than their seed.
    """
    if over and any(over not in flat(run.settings) for run in runs):
        raise UserError(
            f"over: expected a key of the runs' settings, such as ppo.init_kl_coef or cory.weight, got {over!r}"
        )
    members: dict[str, list[Record]] = {}
    groups = []
    for run, family in zip(runs, families or _families(runs, over), strict=True):
        value = value_of(run.settings, over)
        name = group_name(family, over, value)
        while any(other_data(other.settings, run.settings) for other in members.get(name, [])):
            name += ", other data"
        members.setdefault(name, []).append(run)
        groups.append(Group(name, family, value))
    for name, alike in members.items():
        if not all(same(a.settings, b.settings) for a, b in itertools.combinations(alike, 2)):
            raise UserError(
                f"{name}: expected runs that differ in their seed alone, got {folders(alike)}"
            )
    return groups


def value_of(settings: Mapping[str, Any], over: str | None) -> Any:
    """A run's value of the key `over`; None without one, and for one agent if it is about several."""
    if over is None or (is_about_several(over) and single(settings)):
        return None
    return flat(settings)[over]


def group_name(family: str, over: str | None, value: Any) -> str:
    """`CORY`, or with a value of `over` `CORY, learning_rate 3e-05`."""
    return family if over is None or value is None else f"{family}, {over.split('.')[-1]} {value}"


def _families(runs: Sequence[Record], over: str | None) -> list[str]:
    """A name for each run, the same for runs that differ in their seed and in `over` alone."""
    apart_from = ["seed", *([over] if over else [])]
    kinds: list[list[Record]] = []
    kind_of = []
    for run in runs:
        for index, kind in enumerate(kinds):
            if all(same(other.settings, run.settings, apart_from) for other in kind):
                kind.append(run)
                kind_of.append(index)
                break
        else:
            kinds.append([run])
            kind_of.append(len(kinds) - 1)
    labels = names([typical(kind) for kind in kinds], apart_from)
    return [labels[index] for index in kind_of]


def typical(runs: Sequence[Record]) -> dict[str, Any]:
    """The settings of one of the runs, one with a fingerprint if there is any."""
    return next((run for run in runs if run.settings.get("fingerprint")), runs[0]).settings


def changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The dotted keys in which two runs differ, of those that matter, data apart (`other_data`)."""
    return [key for key in differences(a, b, UNRELATED) if key not in DATA]


def same(a: Mapping[str, Any], b: Mapping[str, Any], apart_from: Sequence[str] = ("seed",)) -> bool:
    """Whether two runs have the same settings, of those that matter, apart from some."""
    return set(changed(a, b)) <= set(apart_from)


def other_data(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two runs of one seed were trained on different data; unknown data count as the same."""
    if a.get("seed") != b.get("seed"):
        return False
    ours = [flat(a).get(key) for key in DATA]
    theirs = [flat(b).get(key) for key in DATA]
    return None not in (ours[0], theirs[0]) and ours != theirs


def method(settings: Mapping[str, Any]) -> str:
    """`PPO`, `CORY`, `CORY, 3 agents`, `GRPO`, `CORY with GRPO`, ...: what trains, and how many learn."""
    agents = num_agents(settings)
    roles = num_roles(settings)
    algorithm = settings.get("algorithm", "ppo")
    if agents == roles == 1:
        return algorithm.upper()
    name = "CORY" if algorithm == "ppo" else f"CORY with {algorithm.upper()}"
    if agents == roles:
        return name if agents == 2 else f"{name}, {agents} agents"
    return f"{name}, {agents} agent{'s' * (agents > 1)} in {roles} roles"


def single(settings: Mapping[str, Any]) -> bool:
    """Whether one agent is trained alone, so that keys about several have no effect."""
    return num_agents(settings) == num_roles(settings) == 1


def is_about_several(key: str) -> bool:
    """Whether a key has an effect on several agents alone: `branches`, and those of `cory` but for `reset_every`."""
    return key == "branches" or (key.startswith("cory.") and key != "cory.reset_every")


def varying(settings: Sequence[Mapping[str, Any]], ignored: Sequence[str] = ()) -> list[str]:
    """The dotted keys in which settings differ, of those that matter.

    A whole block that only some have, such as `task`, is left out: the fingerprint tells tasks apart.
    """
    keys = dict.fromkeys(
        key for a, b in itertools.combinations(settings, 2) for key in changed(a, b)
    )
    existing = {key for values in settings for key in flat(values)}
    return [key for key in keys if key in existing and key not in ignored]


def names(settings: Sequence[Mapping[str, Any]], ignored: Sequence[str] = ("seed",)) -> list[str]:
    """A name for each of several settings: the method, and where that does not tell them apart, what differs.

    What is about several agents (`is_about_several`) does not appear in the name of a single one. The fingerprint
    appears only as far as the settings do not tell runs apart.
    """
    methods = [method(values) for values in settings]
    result = []
    for values, kind in zip(settings, methods, strict=True):
        rivals = [other for other, name in zip(settings, methods, strict=True) if name == kind]
        differ = [
            key
            for key in varying(rivals, ignored)
            if not (single(values) and is_about_several(key))
        ]
        keys = [key for key in differ if not key.startswith("fingerprint.")]
        for key in differ:
            told_apart = {str([flat(rival).get(k) for k in keys]) for rival in rivals}
            if key not in keys and len(told_apart) < len(rivals):
                keys.append(key)
        parts = []
        for key in keys:
            others = [flat(rival).get(key) for rival in rivals]
            parts.append(f"{key.split('.')[-1]} {_short(flat(values).get(key), others)}")
        result.append(", ".join([kind, *parts]))
    return result


def folders(runs: Sequence[Record]) -> str:
    """Runs for a message: their folders, and what is wrong with them."""
    return ", ".join(f"{run.folder} ({'; '.join(run.problems) or 'whole'})" for run in runs)


def _short(value: Any, others: Sequence[Any]) -> str:
    """A value in a name: of a path as many of its last parts as tell it from the other values."""
    if not isinstance(value, str) or "/" not in value:
        return str(value)
    parts = Path(value).parts
    paths = [Path(other).parts for other in others if isinstance(other, str) and other != value]
    for count in range(1, len(parts)):
        if all(path[-count:] != parts[-count:] for path in paths):
            return "/".join(parts[-count:])
    return value
