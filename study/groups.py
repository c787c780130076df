"""Groups of runs that differ in their seed alone: which runs belong together, and what a group is called."""

import glob
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cory.errors import UserError
from cory.resume.differences import differences
from study.records import Record, flat, num_agents, num_roles

# Hash and length of a run's data. Queries may be drawn from the seed, as IMDB's are, so only runs of one seed compare.
DATA = ("fingerprint.dataset_sha256", "fingerprint.rows")


@dataclass
class Group:
    """Runs that differ in their seed alone.

    Args:
        name: unique. family: of the groups that differ in the key `over` alone. value: of that key.
        runs: all of them; `whole` are those without a problem.
    """

    name: str
    family: str
    value: Any
    runs: list[Record] = field(default_factory=list)

    @property
    def whole(self) -> list[Record]:
        """Its runs without a problem."""
        return [run for run in self.runs if run.complete]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of one of its runs, one with a fingerprint if there is any."""
        return _typical(self.runs)


def find(patterns: Sequence[str]) -> list[Path]:
    """The runs' folders that paths and globs name, each once, sorted within a glob.

    Other files, such as logs, are skipped.

    Raises:
        UserError: a pattern matches no run.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        paths = [Path(pattern)] if Path(pattern).is_dir() else [Path(name) for name in sorted(glob.glob(pattern))]
        runs = [path for path in paths if (path / "config.yaml").is_file()]
        found |= dict.fromkeys(runs)
        if not runs and (not Path(pattern).is_file() or (not found and pattern == patterns[-1])):
            raise UserError(f"runs: expected folders of runs (with a config.yaml), got {pattern!r}, which matches none")
    return list(found)


def group(runs: Sequence[Record], over: str | None = None, families: Sequence[str] | None = None) -> list[Group]:
    """Groups runs by their settings.

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
    groups: dict[str, Group] = {}
    for run, family in zip(runs, families or _families(runs, over), strict=True):
        concerned = over and not (over.startswith("cory.") and single(run.settings))
        value = flat(run.settings)[over] if over and concerned else None
        name = family if value is None else f"{family}, {str(over).split('.')[-1]} {value}"
        while name in groups and any(other_data(other.settings, run.settings) for other in groups[name].runs):
            name += ", other data"
        groups.setdefault(name, Group(name, family, value)).runs.append(run)
    for each in groups.values():
        if not all(same(a.settings, b.settings) for a, b in itertools.combinations(each.runs, 2)):
            raise UserError(f"{each.name}: expected runs that differ in their seed alone, got {folders(each.runs)}")
    return list(groups.values())


def _families(runs: Sequence[Record], over: str | None) -> list[str]:
    """A name for each run, the same for runs that differ in their seed and in `over` alone."""
    apart = ["seed", *([over] if over else [])]
    kinds: list[list[Record]] = []
    kind_of = []
    for run in runs:
        alike = (i for i, kind in enumerate(kinds) if all(same(r.settings, run.settings, apart) for r in kind))
        index = next(alike, len(kinds))
        kinds[index:] = kinds[index:] or [[]]
        kinds[index].append(run)
        kind_of.append(index)
    labels = names([_typical(kind) for kind in kinds], apart)
    return [labels[index] for index in kind_of]


def _typical(runs: Sequence[Record]) -> dict[str, Any]:
    return next((run for run in runs if run.settings.get("fingerprint")), runs[0]).settings


def changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The dotted keys in which two runs differ, of those that matter, data apart (`other_data`)."""
    return [key for line in differences(a, b) if (key := line.split(": ")[0]) not in DATA]


def same(a: Mapping[str, Any], b: Mapping[str, Any], apart_from: Sequence[str] = ("seed",)) -> bool:
    """Whether two runs have the same settings, of those that matter, apart from some."""
    return set(changed(a, b)) <= set(apart_from)


def other_data(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two runs of one seed were trained on different data; unknown data count as the same."""
    one, two = ([flat(each).get(key) for key in DATA] for each in (a, b))
    return a.get("seed") == b.get("seed") and None not in (one[0], two[0]) and one != two


def method(settings: Mapping[str, Any]) -> str:
    """`PPO`, `CORY`, `CORY, 3 agents`, `GRPO`, `CORY with GRPO`, ...: what trains, and how many learn."""
    agents, roles, algorithm = num_agents(settings), num_roles(settings), settings.get("algorithm", "ppo")
    if agents == roles == 1:
        return algorithm.upper()
    name = "CORY" if algorithm == "ppo" else f"CORY with {algorithm.upper()}"
    if agents == roles:
        return name if agents == 2 else f"{name}, {agents} agents"
    return f"{name}, {agents} agent{'s' * (agents > 1)} in {roles} roles"


def single(settings: Mapping[str, Any]) -> bool:
    """Whether one agent is trained alone, so that the `cory` block has no effect."""
    return num_agents(settings) == num_roles(settings) == 1


def varying(settings: Sequence[Mapping[str, Any]], ignored: Sequence[str] = ()) -> list[str]:
    """The dotted keys in which settings differ, of those that matter.

    A whole block that only some have, such as `task`, is left out: the fingerprint tells tasks apart.
    """
    keys = dict.fromkeys(key for a, b in itertools.combinations(settings, 2) for key in changed(a, b))
    known = {key for each in settings for key in flat(each)}
    return [key for key in keys if key in known and key not in ignored]


def names(settings: Sequence[Mapping[str, Any]], ignored: Sequence[str] = ("seed",)) -> list[str]:
    """A name for each of several settings: the method, and where that does not tell them apart, what differs.

    The `cory` block has no effect on a single agent's run, so it does not appear in its name. The fingerprint appears
    only as far as the settings do not tell runs apart.
    """
    methods = [method(each) for each in settings]
    result = []
    for each, kind in zip(settings, methods, strict=True):
        rivals = [other for other, name in zip(settings, methods, strict=True) if name == kind]
        differ = [k for k in varying(rivals, ignored) if not (single(each) and k.startswith("cory."))]
        keys = [key for key in differ if not key.startswith("fingerprint.")]
        for key in differ:
            told = {str([flat(rival).get(k) for k in keys]) for rival in rivals}
            if key not in keys and len(told) < len(rivals):
                keys.append(key)
        values = flat(each)
        result.append(", ".join([kind, *(f"{key.split('.')[-1]} {_short(values.get(key))}" for key in keys)]))
    return result


def folders(runs: Sequence[Record]) -> str:
    """Runs for a message: their folders, and what is wrong with them."""
    return ", ".join(f"{run.folder} ({'; '.join(run.problems) or 'whole'})" for run in runs)


def _short(value: Any) -> str:
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)
