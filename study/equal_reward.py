"""Compares groups by their KL at equal task reward.

A method that learns more slowly has a lower KL at the end whatever else it does. At equal task reward it does not.
KLs differ between seeds by factors, so their means are geometric, and groups are compared by ratios, seed by seed.
`study/readings.py` reads the KL of a run at a level. Definitions: docs/metrics.md.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from study.cells import Rows
from study.frame import KL_GUARD, LAST, RUN, Study, last
from study.intervals import Interval, difference, direction, geometric, holm, ratio
from study.readings import Reading, fitted_kl, readings

ALIKE = (0.8, 1.25)  # two KLs whose ratio's interval lies between these are alike
CORRECTED = "✓"
SHARE = 0.9  # of the runs of every group that must reach a level
ANY = "any"  # of the roles
FIRST_SEEDS = 5  # which choose a level
WHO = ("group", "against", "role", "n")
AT_THE_END = ("task reward", "difference", "KL", "ratio")


def running_means(study: Study, role: str) -> pd.DataFrame:
    """Task reward and KL of a role, means over its last 10 iterations: a row for each run and iteration from the tenth.

    Whichever agent has the role; only runs without a problem. One that the guard of the KL has ended before has a row
    of all its iterations, as leaving it out would flatter its group.
    """
    whole = study.metrics
    rows = whole[whole["role"] == role].sort_values("iteration")
    columns = ["task_reward", "kl"]
    means = rows.groupby(RUN, sort=False)[columns].rolling(LAST).mean().dropna().reset_index(RUN)
    stopped = study.runs[study.runs["stopped_by"] == KL_GUARD][RUN]
    short = stopped[~pd.MultiIndex.from_frame(stopped).isin(pd.MultiIndex.from_frame(means[RUN]))]
    of_short = rows.merge(short.drop_duplicates(), on=RUN).groupby(RUN, sort=False)[columns].mean()
    return pd.concat([means, of_short.reset_index()]) if len(of_short) else means


def kl_at(means: pd.DataFrame, level: float) -> pd.Series:
    """By run, the mean KL where the mean task reward first reaches a level; runs that never do are left out."""
    reached = means[means["task_reward"] >= level]
    return reached.groupby(RUN, sort=False)["kl"].first()


def common_levels(means: pd.DataFrame, step: float) -> list[float]:
    """The multiples of a step that 90 % of every group's runs reach, and none of the groups has from its start."""
    if not len(means):  # all runs are shorter than the window
        return []
    runs = means.groupby(RUN, sort=False)["task_reward"].agg(["first", "max"])
    groups = runs.groupby("group")
    lowest = groups["first"].mean().max()
    levels = []
    number = math.floor(lowest / step) + 1
    while all((highest >= number * step).mean() >= SHARE for _, highest in groups["max"]):
        levels.append(number * step)
        number += 1
    return levels


def primary(
    study: Study,
    compared: Sequence[tuple[str, str]],
    levels: Sequence[float],
    decided_by: Collection[tuple[str, str]],
    roles: Sequence[str] = (),
) -> Rows:
    """By pair of groups and role: task reward and KL at the end, and KL at each level of the fitted task reward.

    A ✓ stands where what a primary difference or ratio says also holds when all primary ones are corrected for (Holm).

    Args:
        compared: pairs of names of groups, ours and the rival, of which the seeds that both have count.
        levels: of task reward.
        decided_by: which are primary, as pairs of a role and the title of a column, such as ("any", "ratio at 1").
        roles: default: any, and the first role.

    Raises:
        LookupError: there is no such role or column.
    """
    roles = roles or (ANY, study.first_role)
    fit = partial(fitted_kl, length=study.drawn_length)
    of_roles = {role: _values_by_run(_of_role(study, role), levels, fit) for role in roles}
    lines = [_compared(of_roles[role], names, role) for names in compared for role in roles]

    tests = {
        (i, title): interval
        for i, line in enumerate(lines)
        for title, interval in line.intervals.items()
        if (line.role, title) in decided_by
    }
    tested = {(lines[i].role, title) for i, title in tests}
    for role, title in decided_by:
        if (role, title) not in tested:
            known = [(role, title) for role in roles for title in lines[0].intervals]
            raise LookupError(f"no primary {(role, title)} among {known}")
    holds = dict(zip(tests, holm([interval.p for interval in tests.values()]), strict=True))
    return [
        line.row([title for title in line.intervals if holds.get((i, title), False)])
        for i, line in enumerate(lines)
    ]


def at_chosen_levels(
    study: Study,
    compared: Sequence[tuple[str, str, str]],
    candidates: Sequence[float],
    rise: bool = False,
    corrected: bool = False,
) -> Rows:
    """By pair of groups and role: KL at the level that the first seeds choose, and the end.

    `chosen_level` has the rule.

    Args:
        compared: ours, the rival, and the role, or `any`.
        candidates: levels of task reward, of which each pair has one; with `rise`, above a run's own start.
        corrected: whether the ratios at the level are primary: a ✓ stands where one also holds when all of them are
            corrected for (Holm).
    """
    fit = partial(fitted_kl, length=study.drawn_length, rise=rise)
    first = study.of_seeds(sorted(study.runs["seed"].unique())[:FIRST_SEEDS])
    lines = []
    chosen = []
    for ours, rival, role in compared:
        level = chosen_level(first, (ours, rival), role, candidates, rise)
        of_role = _of_role(study, role)
        of_pair = of_role[of_role["group"].isin((ours, rival))]
        by_run = _values_by_run(of_pair, [] if level is None else [level], fit)
        lines.append(_compared(by_run, (ours, rival), role))
        chosen.append("none" if level is None else f"{level:g}")

    p_values = []
    for line, level_text in zip(lines, chosen, strict=True):
        interval = line.intervals.get(f"ratio at {level_text}")
        p_values.append(math.nan if interval is None else interval.p)
    holds = holm(p_values) if corrected else [False] * len(lines)

    rows = []
    for line, level_text, held in zip(lines, chosen, holds, strict=True):
        row = line.row([f"ratio at {level_text}"] if held else [])
        shown = {title: row[title] for title in WHO}
        shown["rise" if rise else "level"] = level_text
        for title in ("ratio", "KL", "runs"):
            shown[f"{title} there"] = row.get(f"{title} at {level_text}", "")
        rows.append(shown | {title: row[title] for title in AT_THE_END})
    return rows


def at_all_readings(
    study: Study, compared: Sequence[tuple[str, str, str]], candidates: Sequence[float]
) -> Rows:
    """By pair of groups and role: the ratio of KLs at the level that the first seeds choose, in each reading.

    The verdict is the fit's; *fragile* stands beside it if another reading has another word.

    Args:
        compared: ours, the rival, and the role, or `any`.
        candidates: levels of task reward.
    """
    first = study.of_seeds(sorted(study.runs["seed"].unique())[:FIRST_SEEDS])
    rows = []
    for ours, rival, role in compared:
        row = {"group": ours, "against": rival, "role": role, "level": "none"}
        level = chosen_level(first, (ours, rival), role, candidates)
        intervals = {}
        if level is not None:
            row["level"] = f"{level:g}"
            intervals = ratios_in_all_readings(study, (ours, rival), role, level)
        for name in readings(None):
            row[name] = worded(intervals[name], ".2f", 1.0) if intervals else ""
        row["verdict"] = verdict(intervals) if intervals else ""
        rows.append(row)
    return rows


def ratios_in_all_readings(
    study: Study, names: tuple[str, str], role: str, level: float
) -> dict[str, Interval]:
    """Returns the ratio of two groups' KLs at a level, by reading; the first reading decides."""
    of_role = _of_role(study, role)
    of_pair = of_role[of_role["group"].isin(names)]
    intervals = {}
    for name, reading in readings(study.drawn_length).items():
        by_run = _values_by_run(of_pair, [level], reading)
        intervals[name] = _compared(by_run, names, role).intervals[f"ratio at {level:g}"]
    return intervals


def kls_at_level(study: Study, group: str, role: str, level: float) -> "pd.Series[float]":
    """Returns a group's KL in a role, or in any, where the fitted task reward reaches a level, by seed.

    Seeds whose runs do not reach it are left out.
    """
    rows = _of_role(study.of_runs([run for run in study.names if run[0] == group]), role)
    by_run = _values_by_run(rows, [level], partial(fitted_kl, length=study.drawn_length))
    return by_run[f"KL at {level:g}"].dropna().droplevel("group")


def verdict(intervals: Mapping[str, Interval]) -> str:
    """Returns the word of the first reading, if it has one, and `fragile` if another one has another word."""
    words = [_word(interval, 1.0) for interval in intervals.values()]
    return f"{words[0]}, fragile" if words[0] and len(set(words)) > 1 else words[0]


def chosen_level(
    study: Study, names: tuple[str, str], role: str, candidates: Sequence[float], rise: bool = False
) -> float | None:
    """The highest of some levels that is above every group's start and that 90 % of the runs of two
    groups reach; None: there is none. With `rise`, levels are above a run's own start.
    """
    of_role = _of_role(study, role)
    of_pair = of_role[of_role["group"].isin(names)]
    at_start = of_role[of_role["iteration"] == 0].groupby("group")["task_reward"].mean()
    fit = partial(fitted_kl, length=study.drawn_length, rise=rise)
    for level in sorted(candidates, reverse=True):
        by_run = _values_by_run(of_pair, [level], fit)
        is_above = rise or level > at_start.max()
        if is_above and by_run[f"KL at {level:g}"].notna().mean() >= SHARE:
            return level
    return None


def of_common_seeds(means: pd.DataFrame, names: tuple[str, str]) -> pd.DataFrame:
    """The rows of two groups and of the seeds that both have, or of all seeds if they have none in common."""
    of_pair = means[means["group"].isin(names)]
    groups_of_seed = of_pair.groupby("seed")["group"].nunique()
    in_both = groups_of_seed[groups_of_seed == 2].index
    return of_pair[of_pair["seed"].isin(in_both)] if len(in_both) else of_pair


def _of_role(study: Study, role: str) -> pd.DataFrame:
    """Returns the metrics of a role as those of one agent, or in any role: a row a run, agent and iteration.

    A group that never has the role, as one agent is no observer, counts in any role. Several roles of an agent in an
    iteration are averaged. In any role, agents that are frozen beside others are left out.
    """
    metrics = study.without_frozen(study.metrics)
    if role != ANY:
        of_role = study.of_role(role).metrics
        without_it = ~metrics["group"].isin(of_role["group"])
        metrics = pd.concat([of_role, metrics[without_it]])
    columns = ["task_reward", "kl", "response_tokens"]
    return metrics.groupby([*RUN, "agent", "iteration"])[columns].mean().reset_index()


def _values_by_run(
    metrics: pd.DataFrame, levels: Sequence[float], reading: Reading
) -> pd.DataFrame:
    """By run, each quantity by the title of its column, over the run's agents.

    Means at the end, geometric means at a level, which a run reaches where all its agents do.
    """
    ends = last(metrics).groupby([*RUN, "agent"])[["task_reward", "kl"]].mean()
    by_run = ends.groupby(RUN).mean().rename(columns={"task_reward": "task reward", "kl": "KL"})
    agents = list(metrics.groupby([*RUN, "agent"]))
    for level in levels:
        fitted = {agent: reading(rows, level) for agent, rows in agents}
        by_run[f"KL at {level:g}"] = _over_agents(fitted, ends.index)
    return by_run


def _over_agents(values: dict[tuple, float], agents: pd.MultiIndex) -> "pd.Series[float]":
    """The geometric mean by run; NaN where an agent has none, or none above 0."""
    by_agent = pd.Series(values).reindex(agents)
    return by_agent.groupby(RUN).agg(lambda of_run: geometric(of_run).value)


@dataclass(frozen=True)
class Line:
    """A pair of groups compared in a role.

    Args:
        cells: by the title of its column, what a cell holds.
        intervals: by the title of its column, what a cell says of a difference, or of a ratio.
    """

    role: str
    cells: dict[str, str]
    intervals: dict[str, Interval]

    def row(self, ticked: Collection[str]) -> dict[str, str]:
        """The cells, with a ✓ in the columns `ticked`."""
        row = dict(self.cells)
        for title, interval in self.intervals.items():
            form, equal = ("+.2f", 0.0) if title == "difference" else (".2f", 1.0)
            row[title] = worded(interval, form, equal, title in ticked)
        return row


def _compared(by_run: pd.DataFrame, names: tuple[str, str], role: str) -> Line:
    of_pair = of_common_seeds(by_run.reset_index(), names).set_index(RUN)
    ours, rival = (of_pair.loc[name] for name in names)
    cells = {"group": names[0], "against": names[1], "role": role, "n": str(len(ours))}
    intervals = {}

    rewards = ours["task reward"], rival["task reward"]
    cells["task reward"] = ", ".join(f"{of_group.mean():.2f}" for of_group in rewards)
    cells["difference"] = ""
    intervals["difference"] = difference(*rewards)
    for title in by_run.columns.drop("task reward"):
        kls = ours[title].dropna(), rival[title].dropna()
        both = kls[0].index.intersection(kls[1].index)
        cells[title] = ", ".join(kl_text(geometric(kl[both]).value) for kl in kls)
        of_ratio = title.replace("KL", "ratio")
        cells[of_ratio] = ""
        intervals[of_ratio] = ratio(*kls)
        if title != "KL":
            cells[title.replace("KL", "runs")] = ", ".join(str(len(kl)) for kl in kls)
    return Line(role, cells, intervals)


def of_group(values: "pd.Series[float]", name: str | None) -> "pd.Series[float]":
    """The values of a group by seed."""
    return values[values.index.get_level_values("group") == name].droplevel("group")


def worded(interval: Interval, form: str, equal: float, holds: bool = False) -> str:
    """An interval and what it says, with a ✓ where that also `holds` when all of a table are corrected for.

    Empty where there is no value, as no run has one.
    """
    if math.isnan(interval.value):
        return ""
    word = _word(interval, equal)
    tick = CORRECTED if holds and word else ""
    return f"{interval.text(form)} {word} {tick}".strip()


def _word(interval: Interval, equal: float) -> str:
    """Returns what an interval says: lower, higher, alike (of a ratio), undecided, or nothing."""
    word = direction(interval, equal)
    is_within = ALIKE[0] <= interval.low and interval.high <= ALIKE[1]
    return "alike" if word == "undecided" and equal == 1 and is_within else word


def kl_text(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.2f}"
