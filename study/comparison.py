"""What runs come to side by side: groups of seeds, final values, differences to a baseline, and what weakens them.

Definitions: docs/metrics.md, "Comparison". `cory/compare.py` writes it all down.
"""

import glob
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cory import metrics
from cory.config import UserError
from cory.run.report import CURVES
from study.plots import Curve, Point
from study.records import Record, flat, method, names, same, shown, varying
from study.statistics import bootstrap, hypervolume, nondominated

LAST = 10  # iterations averaged into a final value
ROLE_WINDOW = 20  # iterations averaged by role: as many of each role, with the paper's exchange period of 5
TEXT = 160  # characters of a sample that are shown
FINAL = {"task_reward": "task reward", "kl": "KL", "combined_reward": "combined reward", "distinct_2": "distinct-2",
         "response_tokens": "length"}  # fmt: skip


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


def find(patterns: Sequence[str]) -> list[Path]:
    """The runs' folders that paths and globs name, each once, sorted within a glob.

    Raises:
        UserError: a pattern matches no run.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        paths = [Path(pattern)] if Path(pattern).is_dir() else [Path(name) for name in sorted(glob.glob(pattern))]
        runs = [path for path in paths if (path / "config.yaml").is_file()]
        if not runs:
            raise UserError(f"runs: expected folders of runs (with a config.yaml), got {pattern!r}, which matches none")
        found |= dict.fromkeys(runs)
    return list(found)


def group(runs: Sequence[Record], over: str | None = None, families: Sequence[str] | None = None) -> list[Group]:
    """Groups runs by their settings.

    Args:
        over: a dotted key whose values make groups of one family.
        families: a name for each run; default: from the settings.
    """
    apart = ["seed", *([over] if over else [])]
    if over and any(over not in flat(run.settings) for run in runs):
        raise UserError(f"over: expected a key of the runs' settings, such as ppo.init_kl_coef, got {over!r}")
    if families is None:
        kinds: list[Record] = []
        for run in runs:
            if not any(same(kind.settings, run.settings, apart) for kind in kinds):
                kinds.append(run)
        labels = names([kind.settings for kind in kinds], apart)
        families = [
            next(name for kind, name in zip(kinds, labels, strict=True) if same(kind.settings, run.settings, apart))
            for run in runs
        ]
    groups: dict[str, Group] = {}
    for run, family in zip(runs, families, strict=True):
        concerned = over and not (over.startswith("cory.") and method(run.settings) == "PPO")
        value = flat(run.settings)[over] if over and concerned else None
        name = family if value is None else f"{family}, {str(over).split('.')[-1]} {value}"
        groups.setdefault(name, Group(name, family, value)).runs.append(run)
    for each in groups.values():
        if not all(same(each.runs[0].settings, run.settings) for run in each.runs):
            raise UserError(f"{each.name}: expected runs that differ in their seed alone, got {_folders(each.runs)}")
    return list(groups.values())


def final(run: Record, metric: str, agent: str | None = None) -> float:
    """A metric's mean over the last 10 iterations, of one agent or of all."""
    rows = [row for name in ([agent] if agent else run.agents) for row in run.of(name, LAST)]
    return statistics.fmean(row[metric] for row in rows)


def collapsed(run: Record) -> bool:
    """Whether an agent has collapsed by the last 10 iterations (`cory.metrics.collapsed`)."""
    start = {row["role"]: row["distinct_2"] for row in run.rows if row["iteration"] == 0}
    bound = flat(run.settings).get("guards.kl_bound", 50.0)
    for agent in run.agents:
        rows = run.of(agent, LAST)
        share = statistics.fmean(row["distinct_2"] / max(start[row["role"]], 1e-9) for row in rows)
        if metrics.collapsed(share, statistics.fmean(row["kl"] for row in rows), bound):
            return True
    return False


def variance(runs: Sequence[Record]) -> float:
    """Training variance: of the task reward across seeds (mean over agents), averaged over iterations; 0 for one."""
    return variance_of([rewards(run) for run in runs])


def variance_of(series: Sequence[Sequence[float]]) -> float:
    """Variance across series, averaged over their places (as many as the shortest has); 0 for one."""
    if len(series) < 2:
        return 0.0
    length = min(map(len, series))
    return float(np.var([values[:length] for values in series], axis=0, ddof=1).mean())


def rewards(run: Record) -> list[float]:
    """The task reward of each iteration, mean over agents."""
    by_iteration: dict[int, list[float]] = {}
    for row in run.rows:
        by_iteration.setdefault(row["iteration"], []).append(row["task_reward"])
    return [statistics.fmean(values) for values in by_iteration.values()]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """`mean ± std`, or the value of a single one."""
    if not values:
        return "none"
    std = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{std}"


class Comparison:
    """Groups of runs, and everything that is said of them.

    Args:
        groups: from `group`.
        baseline: name of the group, or of the family, that others are measured against; default, the first with one
            agent, or the first.
        over: the dotted key that makes families.

    Raises:
        UserError: no run holds a single iteration, or there is no such baseline.
    """

    def __init__(self, groups: Sequence[Group], baseline: str | None = None, over: str | None = None) -> None:
        self.groups, self.over = list(groups), over
        known = [g for g in self.groups if g.whole]
        if not known:
            raise UserError(
                f"runs: expected at least one that ended, got {_folders([r for g in groups for r in g.runs])}"
            )
        if baseline is None:
            first = next((g for g in known if len(g.whole[0].agents) == 1), known[0])
            baseline = first.family if over else first.name
        self.baseline = baseline
        self.base = [g for g in known if baseline in (g.name, g.family)]
        if not self.base:
            raise UserError(f"baseline: expected one of {[g.name for g in known]}, got {baseline!r}")
        self.eta = flat(self.base[0].whole[0].settings)["ppo.init_kl_coef"]
        if over != "ppo.init_kl_coef":  # one objective for all
            for run in (run for g in self.groups for run in g.runs):
                for row in run.rows:
                    row["combined_reward"] = row["task_reward"] - self.eta * row["kl"]

    def against(self, g: Group) -> Group:
        """What a group is measured against: the baseline's group of the same value, where it has one."""
        return next((base for base in self.base if base.value == g.value), self.base[0])

    def agents(self, g: Group) -> list[tuple[str, str]]:
        """A group's agents and what they are called: the group's name, and LLM1, LLM2 where there are several."""
        agents = next((run.agents for run in g.runs if run.rows), [])
        if len(agents) == 1:
            return [(agents[0], g.name)]
        kind, _, rest = g.name.partition(", ")
        return [(a, f"{kind} LLM{i}" + (f", {rest}" if rest else "")) for i, a in enumerate(agents, 1)]

    def final_rows(self) -> list[dict[str, Any]]:
        """By group and agent: the metrics over the last iterations, a list with a value per run."""
        return [
            {"name": name, "n": len(g.whole), **{m: [final(run, m, agent) for run in g.whole] for m in FINAL}}
            for g in self.groups
            for agent, name in self.agents(g)
        ]

    def run_rows(self) -> list[dict[str, Any]]:
        """By run and agent: the metrics over the last iterations, and whether the run collapsed."""
        return [
            {"group": g.name, "agent": name, "seed": run.settings.get("seed"),
             **{m: f"{final(run, m, agent):.6g}" for m in FINAL}, "collapsed": collapsed(run)}
            for g in self.groups
            for run in g.whole
            for agent, name in self.agents(g)
        ]  # fmt: skip

    def role_rows(self) -> list[dict[str, str]]:
        """By group, agent and role: task reward and KL over the last 20 iterations."""
        rows = []
        for g in self.groups:
            for agent, name in self.agents(g):
                for role in dict.fromkeys(row["role"] for run in g.whole for row in run.of(agent, ROLE_WINDOW)):
                    values: dict[str, list[float]] = {"task_reward": [], "kl": []}
                    for run in g.whole:
                        part = [row for row in run.of(agent, ROLE_WINDOW) if row["role"] == role]
                        for metric in values:
                            values[metric] += [statistics.fmean(row[metric] for row in part)] if part else []
                    rows.append(
                        {"agent": name, "role": role, "task reward": spread(values["task_reward"]),
                         "KL": spread(values["kl"], 2)}
                    )  # fmt: skip
        return rows

    def group_rows(self) -> list[dict[str, Any]]:
        """By group: policy optimality, collapse rate, training variance, and the differences to the baseline."""
        rows = []
        for g in self.groups:
            if not g.whole:
                continue
            row = {
                "name": g.name,
                "n": len(g.whole),
                "policy_optimality": [final(run, "combined_reward") for run in g.whole],
                "collapse_rate": statistics.fmean(collapsed(run) for run in g.whole),
                "training_variance": variance(g.whole),
            }
            if g not in self.base:
                for key, measure in (("optimality", _optimality), ("variance", variance)):
                    row[f"{key}_change"] = self.change(g, measure)
            rows.append(row)
        return rows

    def change(self, g: Group, measure: Callable[[Sequence[Record]], float]) -> tuple[float, float, float]:
        """A group's measure against the baseline's: the difference over the baseline's size, and its 95 % interval."""

        def relative(runs: Sequence[Record], base: Sequence[Record]) -> float:
            reference = measure(base)
            return (measure(runs) - reference) / abs(reference) if reference else float("nan")

        return bootstrap(relative, g.whole, self.against(g).whole)

    def curves(self) -> list[Curve]:
        """By group and agent, each metric's values of every run."""
        return [
            Curve(
                name, index, number, {m: [[r[m] for r in run.of(agent)] for run in g.runs if run.rows] for m in CURVES}
            )
            for number, g in enumerate(self.groups)
            for index, (agent, name) in enumerate(self.agents(g))
        ]

    def points(self) -> list[Point]:
        """By group, with `over`: its value, and the final metrics of every whole run, mean over agents."""
        return [
            Point(g.family, g.value, {metric: [final(run, metric) for run in g.whole] for metric in CURVES})
            for g in self.groups
            if g.whole
        ]

    def frontier_rows(self) -> list[dict[str, str]]:
        """By family: which of its points (task reward, -KL) no other of its points beats, and their hypervolume."""
        points = self.points()
        every = [(statistics.fmean(p.values["task_reward"]), -statistics.fmean(p.values["kl"])) for p in points]
        worst = (min(x for x, _ in every), min(y for _, y in every))
        rows = []
        for family in dict.fromkeys(p.family for p in points):
            own = [i for i, p in enumerate(points) if p.family == family]
            best = nondominated([every[i] for i in own])
            rows.append(
                {
                    "family": family,
                    "points": str(len(own)),
                    "not dominated": ", ".join(str(points[own[i]].value) for i in best),
                    "hypervolume": f"{hypervolume([every[i] for i in own], worst):.4g}",
                }
            )
        return rows

    def setting_rows(self) -> list[dict[str, str]]:
        """The settings in which groups differ, a column for each group."""
        first = [g.runs[0].settings for g in self.groups]
        keys = varying(first, ("seed",)) + (["iterations"] if len({s.get("iterations") for s in first}) > 1 else [])
        return [
            {"setting": key, **{g.name: shown(flat(s).get(key, "")) for g, s in zip(self.groups, first, strict=True)}}
            for key in keys
        ]

    def problems(self) -> list[str]:
        """Everything that makes the comparison weaker than it looks."""
        said = []
        for g in self.groups:
            said += [f"{g.name}, {run.folder.name}: {problem}" for run in g.runs for problem in run.problems]
            if g.runs and not g.whole:
                said.append(f"{g.name}: no run ended; it is in no table")
            if len(g.whole) == 1:
                said.append(f"{g.name}: a single run, so there is no spread")
            seeds = [run.settings.get("seed") for run in g.whole]
            if len(set(seeds)) < len(seeds):
                said.append(f"{g.name}: seed {_twice(seeds)} is there more than once; such runs are no repetitions")
        lengths = {g.name: sorted({run.iterations for run in g.whole}) for g in self.groups if g.whole}
        if len({length for values in lengths.values() for length in values}) > 1:
            text = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in lengths.items())
            said.append(f"runs of unequal length in iterations ({text}): final values are of each run's own end")
        return said

    def texts(self) -> list[dict[str, str]]:
        """The same queries answered by the base and by every agent of each group's first whole run."""
        rows: list[dict[str, str]] = []
        for g in self.groups:
            if not g.whole:
                continue
            samples = g.whole[0].samples
            for agent, name in self.agents(g):
                for number, after in enumerate(samples.get("after", {}).get(agent, [])):
                    if number == len(rows):
                        base = samples["before"][agent][number]
                        rows.append({"query": _cut(after["query"]), "base": _shown(base)})
                    if _cut(after["query"]) == rows[number]["query"]:
                        rows[number][name] = _shown(after)
        columns = dict.fromkeys(key for row in rows for key in row)
        return [{key: row.get(key, "") for key in columns} for row in rows]


def _optimality(runs: Sequence[Record]) -> float:
    return statistics.fmean(final(run, "combined_reward") for run in runs)


def _shown(sample: dict[str, Any]) -> str:
    return f"[{sample['task_reward']:+.2f}] {_cut(sample['completion'])}"


def _cut(text: str) -> str:
    return text if len(text) <= TEXT else text[: TEXT - 3] + "..."


def _folders(runs: Sequence[Record]) -> str:
    return ", ".join(f"{run.folder} ({'; '.join(run.problems) or 'whole'})" for run in runs)


def _twice(values: Sequence[Any]) -> Any:
    return next(value for value in values if values.count(value) > 1)
