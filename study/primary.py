"""The primary comparisons of a page: task reward and KL at the end, and KL where a fitted task reward reaches a level.

In any role, as in the paper's figures: an LLM's own task reward and KL in whatever role it holds. Beside it, of one
role, whichever LLM has it. Where a noisy mean first reaches a level is early by chance, and depends on the lengths of
the responses; so task reward and KL are fitted over the whole run, at one length. Definitions: docs/metrics.md.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from study.cells import Rows
from study.equal_reward import kl_text, of_common_seeds, worded
from study.frame import LAST, RUN, Study, last
from study.intervals import Interval, difference, geometric, holm, ratio

ANY = "any"  # of the roles
DEGREE = 4  # of the polynomials in the iteration
STEP = 0.1  # of an iteration


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
    length = typical_length(study)
    of_roles = {role: _values_by_run(_of_role(study, role), levels, length) for role in roles}
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


def typical_length(study: Study) -> float:
    """The length of responses at which task reward and KL are compared: the mean over a study's runs."""
    return float(study.whole_metrics.groupby(RUN)["response_tokens"].mean().mean())


def fitted_kl(rows: pd.DataFrame, level: float, length: float) -> float:
    """The KL where the fitted task reward first reaches a level, of one agent's rows; NaN if it never does.

    Task reward and log KL are each, by least squares, a polynomial in the iteration plus a multiple of the length.
    """
    if len(rows) < DEGREE + 2:
        return math.nan
    iterations = rows["iteration"].to_numpy(float)
    lengths = rows["response_tokens"].to_numpy(float)
    kl = rows["kl"].to_numpy(float)
    # From its own mean: lengths that are all alike then have no effect, as they show none.
    longer = lengths - lengths.mean()
    grid = np.arange(iterations.min(), iterations.max() + STEP / 2, STEP)
    span = max(iterations.max(), 1.0)

    def fit(values: np.ndarray, which: np.ndarray) -> np.ndarray:
        terms = np.column_stack([np.vander(iterations / span, DEGREE + 1), longer])
        coefficients = np.linalg.lstsq(terms[which], values[which], rcond=None)[0]
        at_length = np.full(len(grid), length - lengths.mean())
        return np.column_stack([np.vander(grid / span, DEGREE + 1), at_length]) @ coefficients

    reached = fit(rows["task_reward"].to_numpy(float), np.full(len(rows), True)) >= level
    positive = kl > 0  # not before the first update, nor everywhere if it is estimated from samples
    if not reached.any() or positive.sum() < DEGREE + 2:
        return math.nan
    log_kl = fit(np.log(np.where(positive, kl, 1.0)), positive)
    return float(np.exp(log_kl[reached.argmax()]))


def first_passage_kl(rows: pd.DataFrame, level: float) -> float:
    """The mean KL of the first 10 iterations in a row whose mean task reward reaches a level; NaN if none do."""
    means = rows.sort_values("iteration")[["task_reward", "kl"]].rolling(LAST).mean()
    reached = means.loc[means["task_reward"] >= level, "kl"]
    return float(reached.iloc[0]) if len(reached) else math.nan


def _of_role(study: Study, role: str) -> pd.DataFrame:
    """The metrics of a role as those of one agent, or in any role: a row for each run, agent and iteration.

    Of an agent in several roles of an iteration, means over these.
    """
    if role != ANY:
        study = study.of_role(role)
    columns = ["task_reward", "kl", "response_tokens"]
    return study.whole_metrics.groupby([*RUN, "agent", "iteration"])[columns].mean().reset_index()


def _values_by_run(metrics: pd.DataFrame, levels: Sequence[float], length: float) -> pd.DataFrame:
    """By run, each quantity by the title of its column, over the run's agents.

    Means at the end, geometric means at a level, which a run reaches where all its agents do.
    """
    ends = last(metrics).groupby([*RUN, "agent"])[["task_reward", "kl"]].mean()
    by_run = ends.groupby(RUN).mean().rename(columns={"task_reward": "task reward", "kl": "KL"})
    agents = list(metrics.groupby([*RUN, "agent"]))
    for level in levels:
        fitted = {agent: fitted_kl(rows, level, length) for agent, rows in agents}
        passed = {agent: first_passage_kl(rows, level) for agent, rows in agents}
        by_run[f"KL at {level:g}"] = _over_agents(fitted, ends.index)
        by_run[f"KL, first passage of {level:g}"] = _over_agents(passed, ends.index)
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
