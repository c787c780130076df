"""Compares groups by their KL at equal task reward.

A method that learns more slowly ends with a lower KL for that reason alone, so KLs are compared at equal task reward.
Seeds change KLs by factors, so means are geometric, and two groups are compared by the ratios of their runs with the
same seed. `study/readings.py` reads a run's KL where its task reward reaches a level. Definitions: docs/metrics.md.
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

ALIKE = (0.8, 1.25)  # two KLs are "alike" if the interval of their ratio lies within these bounds
CORRECTED = "✓"
SHARE = 0.9  # a level counts only if this share of every group's runs reaches it
ANY = "any"  # in place of a role: the average over an agent's roles
FIRST_SEEDS = 5  # the number of seeds by which a level is chosen
WHO = ("group", "against", "role", "n")
AT_THE_END = ("task reward", "difference", "KL", "ratio")


def running_means(study: Study, role: str) -> pd.DataFrame:
    """Returns running means of a role's task reward and KL over 10 iterations: a row per run and iteration.

    A run's rows begin with its tenth iteration. A run that the KL guard ended earlier has one row, the mean of all its
    iterations, because its group would look better without it. Other short runs are left out.
    """
    metrics = study.metrics
    rows = metrics[metrics["role"] == role].sort_values("iteration")
    columns = ["task_reward", "kl"]
    means = rows.groupby(RUN, sort=False)[columns].rolling(LAST).mean().dropna().reset_index(RUN)
    stopped = study.runs[study.runs["stopped_by"] == KL_GUARD][RUN]
    short = stopped[~pd.MultiIndex.from_frame(stopped).isin(pd.MultiIndex.from_frame(means[RUN]))]
    short_rows = rows.merge(short.drop_duplicates(), on=RUN)
    short_means = short_rows.groupby(RUN, sort=False)[columns].mean()
    return pd.concat([means, short_means.reset_index()]) if len(short_means) else means


def kl_at(means: pd.DataFrame, level: float) -> pd.Series:
    """Returns each run's mean KL where its mean task reward first reaches a level. Other runs are left out."""
    reached = means[means["task_reward"] >= level]
    return reached.groupby(RUN, sort=False)["kl"].first()


def common_levels(means: pd.DataFrame, step: float) -> list[float]:
    """Returns the multiples of `step` above all groups' initial rewards, reached by 90 % of each group's runs."""
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
    """Compares pairs of groups in each role: task reward and KL at the end, and KL at levels of fitted task reward.

    A ✓ marks primary differences and ratios whose verdict survives Holm's correction over all primary ones.

    Args:
        compared: pairs of group names, ours and the rival. Only seeds that both groups have are used.
        levels: levels of task reward.
        decided_by: the primary comparisons; each is a role and a column title, such as ("any", "ratio at 1").
        roles: the roles to compare. Default: `any`, and the first role.

    Raises:
        LookupError: a primary comparison names an unknown role or column.
    """
    roles = roles or (ANY, study.first_role)
    fit = partial(fitted_kl, length=study.drawn_length)
    role_values = {role: _values_by_run(_role_metrics(study, role), levels, fit) for role in roles}
    lines = [_compare(role_values[role], names, role) for names in compared for role in roles]

    tests = {
        (i, title): interval
        for i, line in enumerate(lines)
        for title, interval in line.intervals.items()
        if (line.role, title) in decided_by
    }
    tested = {(lines[i].role, title) for i, title in tests}
    for role, title in decided_by:
        if (role, title) not in tested:
            existing = [(role, title) for role in roles for title in lines[0].intervals]
            raise LookupError(f"no primary {(role, title)} among {existing}")
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
    """Compares pairs of groups in a role: KL at a level of task reward, and the end of training.

    The first seeds choose the level (`chosen_level`).

    Args:
        compared: triples of our group, the rival, and a role or `any`.
        candidates: levels of task reward from which each pair's level is chosen.
        rise: whether levels are relative to a run's task reward at the start.
        corrected: whether the ratios at the level are primary; a ✓ marks those that survive Holm's correction.
    """
    fit = partial(fitted_kl, length=study.drawn_length, rise=rise)
    lines = []
    chosen = []
    for ours, rival, role in compared:
        level = chosen_level(study, (ours, rival), role, candidates, rise)
        metrics = _role_metrics(study, role)
        pair_metrics = metrics[metrics["group"].isin((ours, rival))]
        by_run = _values_by_run(pair_metrics, [] if level is None else [level], fit)
        lines.append(_compare(by_run, (ours, rival), role))
        chosen.append("none" if level is None else f"{level:g}")

    p_values = []
    for line, level_text in zip(lines, chosen, strict=True):
        interval = line.intervals.get(f"ratio at {level_text}")
        p_values.append(math.nan if interval is None else interval.p)
    holds = holm(p_values) if corrected else [False] * len(lines)

    rows = []
    for line, level_text, is_corrected in zip(lines, chosen, holds, strict=True):
        row = line.row([f"ratio at {level_text}"] if is_corrected else [])
        shown = {title: row[title] for title in WHO}
        shown["rise" if rise else "level"] = level_text
        for title in ("ratio", "KL", "runs"):
            shown[f"{title} there"] = row.get(f"{title} at {level_text}", "")
        rows.append(shown | {title: row[title] for title in AT_THE_END})
    return rows


def at_all_readings(
    study: Study, compared: Sequence[tuple[str, str, str]], candidates: Sequence[float]
) -> Rows:
    """Compares pairs of groups in a role: the ratio of their KLs at a level of task reward, in each reading.

    The first seeds choose the level (`chosen_level`). A reading is a way to read off the KL at a level. The polynomial
    fit gives the verdict, which is marked *fragile* if another reading disagrees.

    Args:
        compared: triples of our group, the rival, and a role or `any`.
        candidates: levels of task reward.
    """
    rows = []
    for ours, rival, role in compared:
        row = {"group": ours, "against": rival, "role": role, "level": "none"}
        level = chosen_level(study, (ours, rival), role, candidates)
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
    """Returns the ratio of two groups' KLs at a level, by reading. The first reading gives the verdict."""
    metrics = _role_metrics(study, role)
    pair_metrics = metrics[metrics["group"].isin(names)]
    intervals = {}
    for name, reading in readings(study.drawn_length).items():
        by_run = _values_by_run(pair_metrics, [level], reading)
        intervals[name] = _compare(by_run, names, role).intervals[f"ratio at {level:g}"]
    return intervals


def kls_at_level(study: Study, group: str, role: str, level: float) -> "pd.Series[float]":
    """Returns a group's KL by seed where the fitted task reward reaches a level, in one role or `any`.

    Seeds whose runs do not reach the level are left out.
    """
    rows = _role_metrics(study.of_runs([run for run in study.names if run[0] == group]), role)
    by_run = _values_by_run(rows, [level], partial(fitted_kl, length=study.drawn_length))
    return by_run[f"KL at {level:g}"].dropna().droplevel("group")


def verdict(intervals: Mapping[str, Interval]) -> str:
    """Returns the first reading's verdict, marked `fragile` if another reading gives a different one."""
    words = [_word(interval, 1.0) for interval in intervals.values()]
    return f"{words[0]}, fragile" if words[0] and len(set(words)) > 1 else words[0]


def chosen_level(
    study: Study, names: tuple[str, str], role: str, candidates: Sequence[float], rise: bool = False
) -> float | None:
    """Returns the highest candidate that is above all initial task rewards and reached by 90 % of the two groups' runs.

    Only the first five seeds count. With `rise`, levels are relative to a run's task reward at the start. Returns None
    if no candidate qualifies.
    """
    first_seeds = sorted(study.runs["seed"].unique())[:FIRST_SEEDS]
    metrics = _role_metrics(study.of_seeds(first_seeds), role)
    pair_metrics = metrics[metrics["group"].isin(names)]
    at_start = metrics[metrics["iteration"] == 0].groupby("group")["task_reward"].mean()
    fit = partial(fitted_kl, length=study.drawn_length, rise=rise)
    for level in sorted(candidates, reverse=True):
        by_run = _values_by_run(pair_metrics, [level], fit)
        is_above = rise or level > at_start.max()
        if is_above and by_run[f"KL at {level:g}"].notna().mean() >= SHARE:
            return level
    return None


def of_common_seeds(means: pd.DataFrame, names: tuple[str, str]) -> pd.DataFrame:
    """Returns two groups' rows for the seeds that they share, or for all seeds if they share none."""
    pair_rows = means[means["group"].isin(names)]
    groups_of_seed = pair_rows.groupby("seed")["group"].nunique()
    in_both = groups_of_seed[groups_of_seed == 2].index
    return pair_rows[pair_rows["seed"].isin(in_both)] if len(in_both) else pair_rows


def _role_metrics(study: Study, role: str) -> pd.DataFrame:
    """Returns the metrics of one role, or averaged over an agent's roles (`any`): a row per run, agent and iteration.

    For one role, all rows count as one agent's. A group without the role is averaged as with `any`; PPO, for example,
    has no observer. With `any`, agents that are frozen while others learn are left out.
    """
    metrics = study.without_frozen(study.metrics)
    if role != ANY:
        role_rows = study.of_role(role).metrics
        lacks_role = ~metrics["group"].isin(role_rows["group"])
        metrics = pd.concat([role_rows, metrics[lacks_role]])
    columns = ["task_reward", "kl", "response_tokens"]
    return metrics.groupby([*RUN, "agent", "iteration"])[columns].mean().reset_index()


def _values_by_run(
    metrics: pd.DataFrame, levels: Sequence[float], reading: Reading
) -> pd.DataFrame:
    """Returns each run's values by column title, averaged over its agents.

    Means are arithmetic for final values and geometric at a level. A run reaches a level only if all its agents do.
    """
    ends = last(metrics).groupby([*RUN, "agent"])[["task_reward", "kl"]].mean()
    by_run = ends.groupby(RUN).mean().rename(columns={"task_reward": "task reward", "kl": "KL"})
    agents = list(metrics.groupby([*RUN, "agent"]))
    for level in levels:
        fitted = {agent: reading(rows, level) for agent, rows in agents}
        by_run[f"KL at {level:g}"] = _over_agents(fitted, ends.index)
    return by_run


def _over_agents(values: dict[tuple, float], agents: pd.MultiIndex) -> "pd.Series[float]":
    """Returns the geometric mean over each run's agents; NaN if an agent's value is missing or not above 0."""
    by_agent = pd.Series(values).reindex(agents)
    return by_agent.groupby(RUN).agg(lambda run_values: geometric(run_values).value)


@dataclass(frozen=True)
class Line:
    """A comparison of two groups in a role.

    Args:
        role: the role, or `any`.
        cells: the cells' texts, by column title.
        intervals: the differences and ratios, by column title; `row` formats them.
    """

    role: str
    cells: dict[str, str]
    intervals: dict[str, Interval]

    def row(self, ticked: Collection[str]) -> dict[str, str]:
        """Returns the cells, with a ✓ in the columns `ticked`."""
        row = dict(self.cells)
        for title, interval in self.intervals.items():
            form, equal = ("+.2f", 0.0) if title == "difference" else (".2f", 1.0)
            row[title] = worded(interval, form, equal, title in ticked)
        return row


def _compare(by_run: pd.DataFrame, names: tuple[str, str], role: str) -> Line:
    pair_rows = of_common_seeds(by_run.reset_index(), names).set_index(RUN)
    ours, rival = (pair_rows.loc[name] for name in names)
    cells = {"group": names[0], "against": names[1], "role": role, "n": str(len(ours))}
    intervals = {}

    rewards = ours["task reward"], rival["task reward"]
    cells["task reward"] = ", ".join(f"{group_rewards.mean():.2f}" for group_rewards in rewards)
    cells["difference"] = ""
    intervals["difference"] = difference(*rewards)
    for title in by_run.columns.drop("task reward"):
        kls = ours[title].dropna(), rival[title].dropna()
        both = kls[0].index.intersection(kls[1].index)
        cells[title] = ", ".join(kl_text(geometric(kl[both]).value) for kl in kls)
        ratio_title = title.replace("KL", "ratio")
        cells[ratio_title] = ""
        intervals[ratio_title] = ratio(*kls)
        if title != "KL":
            cells[title.replace("KL", "runs")] = ", ".join(str(len(kl)) for kl in kls)
    return Line(role, cells, intervals)


def of_group(values: "pd.Series[float]", name: str | None) -> "pd.Series[float]":
    """Returns a group's values by seed."""
    return values[values.index.get_level_values("group") == name].droplevel("group")


def worded(interval: Interval, form: str, equal: float, holds: bool = False) -> str:
    """Formats an interval with its verdict, and a ✓ if the verdict `holds` after Holm's correction.

    The text is empty if the interval has no value.
    """
    if math.isnan(interval.value):
        return ""
    word = _word(interval, equal)
    tick = CORRECTED if holds and word else ""
    return f"{interval.text(form)} {word} {tick}".strip()


def _word(interval: Interval, equal: float) -> str:
    """Returns an interval's verdict: lower, higher, alike (only for ratios), undecided, or an empty string."""
    word = direction(interval, equal)
    is_within = ALIKE[0] <= interval.low and interval.high <= ALIKE[1]
    return "alike" if word == "undecided" and equal == 1 and is_within else word


def kl_text(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.2f}"
