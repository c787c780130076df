"""Compares groups of runs: final values, differences to a baseline, and caveats.

Definitions: docs/metrics.md, "Comparison". `study/compare.py` writes the report.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from cory.errors import UserError
from cory.report.summary import CURVES
from study.estimates import difference, relative
from study.groups import DATA, Group, folders, method, single, varying
from study.measures import collapsed, final, near_zero, rewards, spread, variance, variance_change
from study.records import Record, flat, natural, shown
from study.statistics import Interval, bootstrap, hypervolume, nondominated

ROLE_WINDOW = 20  # iterations averaged by role: as many of each role, with the paper's exchange period of 5
TEXT = 160  # characters of a sample that are shown
FINAL = {"task_reward": "task reward", "kl": "KL", "combined_reward": "combined reward", "distinct_2": "distinct-2",
         "response_tokens": "length"}  # fmt: skip
M = TypeVar("M")


class Curve(NamedTuple):
    """An agent's metrics over the iterations: by metric, a pandas.DataFrame of iterations by runs.

    `place` is the agent's in its group, `number` the group's: colour by group, line style by agent.
    """

    name: str
    place: int
    number: int
    values: dict[str, Any]


class Point(NamedTuple):
    """A group's results at one value of the key that families vary: by metric, a value for every run."""

    family: str
    value: Any
    values: dict[str, list[float]]


class Comparison:
    """A comparison of groups of runs.

    Args:
        groups: from `group`.
        baseline: name of the group, or of the family, that others are measured against; default, the first with one
            agent, or the first.
        over: the dotted key that makes families.

    Raises:
        UserError: no run has an iteration, or there is no such baseline.
    """

    def __init__(self, groups: Sequence[Group], baseline: str | None = None, over: str | None = None) -> None:
        self.groups, self.over = list(groups), over
        known = [g for g in self.groups if g.whole]
        if not known:
            raise UserError(
                f"runs: expected at least one that ended, got {folders([r for g in groups for r in g.runs])}"
            )
        if baseline is None:
            alone = [g for g in known if single(g.settings)]
            first = next((g for g in alone if method(g.settings) == "PPO"), [*alone, *known][0])
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

    def against(self, g: Group) -> Group | None:
        """The group to compare with: the baseline, or of a family that of the same value, if it has one."""
        return next((base for base in self.base if base.value == g.value or base.name == self.baseline), None)

    def agents(self, g: Group) -> list[tuple[str, str]]:
        """A group's agents and their labels: the group's name, with `agent_1`, ... where there are several."""
        agents = natural({agent for run in g.runs for agent in run.agents})
        if len(agents) == 1:
            return [(agents[0], g.name)]
        kind, _, rest = g.name.partition(", ")
        return [(agent, f"{kind} {agent}" + (f", {rest}" if rest else "")) for agent in agents]

    def final_rows(self) -> list[dict[str, Any]]:
        """By group and agent: the metrics over the last iterations, a list with a value per run."""
        return [
            {"name": name, "n": len(runs), **{m: [final(run, m, agent) for run in runs] for m in FINAL}}
            for g in self.groups
            for agent, name in self.agents(g)
            if (runs := [run for run in g.whole if agent in run.agents]) or not g.whole
        ]

    def run_rows(self) -> list[dict[str, Any]]:
        """By run and agent: the metrics over the last iterations, and whether the run collapsed."""
        return [
            {"group": g.name, "agent": name, "seed": run.settings.get("seed"),
             **{m: final(run, m, agent) for m in FINAL}, "collapsed": collapsed(run)}
            for g in self.groups
            for run in g.whole
            for agent, name in self.agents(g)
            if agent in run.agents  # all but members of a population that were not drawn
        ]  # fmt: skip

    def role_rows(self) -> list[dict[str, str]]:
        """By group, agent and role: task reward and KL over the last 20 iterations."""
        import pandas as pd  # here and below, as importing it takes a while

        rows = pd.DataFrame(
            [
                {**row, "agent": name, "run": str(run.folder)}
                for g in self.groups
                for agent, name in self.agents(g)
                for run in g.whole
                for row in run.of(agent, ROLE_WINDOW)
            ]
        )
        by_run = rows.groupby(["agent", "role", "run"], sort=False)[["task_reward", "kl"]].mean()
        return [
            {"agent": agent, "role": role, "task reward": spread(of["task_reward"].tolist()),
             "KL": spread(of["kl"].tolist(), 2)}
            for (agent, role), of in by_run.groupby(level=["agent", "role"], sort=False)
        ]  # fmt: skip

    def group_rows(self) -> list[dict[str, Any]]:
        """By group: policy optimality, collapse rate, training variance, and the differences to the baseline."""
        rows = []
        for g in self.groups:
            if not g.whole:
                continue
            row = {
                "name": g.name,
                "n": len(g.whole),
                "policy_optimality": [_optimality(run) for run in g.whole],
                "collapse_rate": statistics.fmean(collapsed(run) for run in g.whole),
                "training_variance": variance(g.whole),
            }
            if g not in self.base and (base := self.against(g)):
                row["optimality_change"] = self.change(g, base, _optimality, relative)
                row["optimality_difference"] = self.change(g, base, _optimality, difference)
                row["near_zero"] = near_zero([_optimality(run) for run in base.whole])
                row["variance_change"] = self.change(g, base, rewards, variance_change, distinct=2)
            rows.append(row)
        return rows

    def change(
        self,
        g: Group,
        base: Group,
        of: Callable[[Record], M],
        statistic: Callable[[Sequence[M], Sequence[M]], float],
        distinct: int = 1,
    ) -> Interval:
        """A difference of a group to its baseline, and its 95 % interval.

        Args:
            of: the quantity of one run. statistic: a number from those of the runs of both groups.
            distinct: runs of each that a resample must have.
        """
        ours, theirs = ([of(run) for run in each.whole] for each in (g, base))
        return bootstrap(statistic, ours, theirs, distinct=distinct)

    def curves(self) -> list[Curve]:
        """By group and agent, each metric of every run; shorter runs end in NaN."""
        import pandas as pd

        return [
            Curve(name, place, number, {
                metric: pd.DataFrame({
                    i: pd.DataFrame(rows).groupby("iteration")[metric].mean()  # over its roles
                    for i, run in enumerate(g.runs)
                    if (rows := run.of(agent))
                }) for metric in CURVES
            })
            for number, g in enumerate(self.groups)
            for place, (agent, name) in enumerate(self.agents(g))
        ]  # fmt: skip

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
                    "not dominated": ", ".join(str(points[own[i]].value) for i in best if len(own) > 1),
                    "hypervolume": f"{hypervolume([every[i] for i in own], worst):.4g}",
                }
            )
        return rows

    def setting_rows(self) -> list[dict[str, str]]:
        """The settings and the fingerprints in which groups differ, a column for each group."""
        settings = {g.name: flat(g.settings) for g in self.groups}
        keys = varying([g.settings for g in self.groups], ("seed",))
        if len({each.get("iterations") for each in settings.values()}) > 1:  # which count only with a schedule
            keys = [*(key for key in keys if key != "iterations"), "iterations"]
        rows = [{"setting": key, **{name: shown(of.get(key, "")) for name, of in settings.items()}} for key in keys]
        return rows + self._data_rows()

    def _data_rows(self) -> list[dict[str, str]]:
        """The data of each group at the first seed at which they differ; empty where they do not."""
        by_seed: dict[Any, dict[str, str]] = {}
        for g in self.groups:
            for run in g.runs:
                data = flat(run.settings).get(DATA[0])
                if data:
                    by_seed.setdefault(run.settings.get("seed"), {})[g.name] = str(data)
        for seed, data_of in by_seed.items():
            if len(set(data_of.values())) > 1:
                row = {g.name: data_of.get(g.name, "") for g in self.groups}
                return [{"setting": f"{DATA[0]} (seed {seed})", **row}]
        return []

    def problems(self) -> list[str]:
        """The caveats: everything that makes the comparison weaker than it looks."""
        said = self._other_rewards()
        for g in self.groups:
            said += [f"{g.name}, {run.folder.name}: {problem}" for run in g.runs for problem in run.problems]
            if g.runs and not g.whole:
                said.append(f"{g.name}: no run ended; the group is left out of the tables")
            if len(g.whole) == 1:
                said.append(f"{g.name}: a single run, so there is no spread")
            if g.whole and not self.against(g):
                said.append(f"{g.name}: no run of the baseline {self.baseline} ended at this value, so no difference")
            seeds = [run.settings.get("seed") for run in g.whole]
            if len(set(seeds)) < len(seeds):
                said.append(f"{g.name}: seed {_twice(seeds)} occurs more than once; such runs are not repetitions")
        lengths = {g.name: sorted({run.iterations for run in g.whole}) for g in self.groups if g.whole}
        if len({length for values in lengths.values() for length in values}) > 1:
            text = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in lengths.items())
            said.append(f"runs of unequal length in iterations ({text}): final values are of each run's own end")
        return said

    def _other_rewards(self) -> list[str]:
        """A caveat if groups were trained on different rewards, by function, its source, or a reward model."""
        trained: dict[tuple[str, str, str], list[str]] = {}
        for g in self.groups:
            of = flat(g.settings)
            reward = str(of.get("fingerprint.reward", "")), str(of.get("fingerprint.reward_sha256", ""))
            if reward[0]:
                trained.setdefault((*reward, shown(of.get("task.reward_model") or "")), []).append(g.name)
        if len(trained) < 2:
            return []
        functions = [function for function, _, _ in trained]
        sources = {(function, source) for function, source, _ in trained}
        parts: list[str] = []
        for (function, source, model), groups in trained.items():
            said = function
            if functions.count(function) > 1:
                said += f" of {model}" if len(sources) == 1 else f" (source {source[:8]})"
            verb = "" if parts else f" {'was' if len(groups) == 1 else 'were'} trained"
            parts.append(f"{' and '.join(groups)}{verb} on {'' if parts else 'the reward '}{said}")
        separator = "; " if any("," in g.name for g in self.groups) else ", "
        return [f"{separator.join(parts)}: their task rewards do not compare"]

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
                        rows.append({"query": _cut(after["query"]), "base": _sample(base)})
                    if _cut(after["query"]) == rows[number]["query"]:
                        rows[number][name] = _sample(after)
        columns = dict.fromkeys(key for row in rows for key in row)
        return [{key: row.get(key, "") for key in columns} for row in rows]


def _optimality(run: Record) -> float:
    return final(run, "combined_reward")


def _sample(sample: dict[str, Any]) -> str:
    return f"[{sample['task_reward']:+.2f}] {_cut(sample['completion'])}"


def _cut(text: str) -> str:
    return text if len(text) <= TEXT else text[: TEXT - 3] + "..."


def _twice(values: Sequence[Any]) -> Any:
    return next(value for value in values if values.count(value) > 1)
