"""Tables of the end of training: means, differences to the baseline.

Definitions: docs/metrics.md, "Comparison". `study/compare.py` writes the page.
"""

import pandas as pd

from study.cells import Rows, column_title, difference_cell, mean_cell
from study.collapse import collapse_times
from study.equal_reward import of_group
from study.frame import METRICS, RUN, Study, natural


def labels(study: Study) -> dict[tuple[str, str], str]:
    """The label of each group's agents: the group's name, with `agent_1`, ... where there are several."""
    result = {}
    for name in study.groups:
        agents = natural(study.final.loc[study.final["group"] == name, "agent"].unique())
        method, _, setting = name.partition(", ")
        for agent in agents:
            result[name, agent] = ", ".join([f"{method} {agent}", *([setting] if setting else [])])
        if len(agents) == 1:
            result[name, agents[0]] = name
    return result


def ends(study: Study) -> Rows:
    """By group: metrics at the end of training, mean over agents, the difference to the baseline, and how many runs
    collapsed on their way, where their metrics are there.
    """
    reward = study.by_seed("combined_reward")
    times = collapse_times(study).min(axis=1) if len(study.metrics) else None
    rows = []
    for name in reward:
        row = {"group": name, "n": str(reward[name].count())}
        for metric in METRICS:
            row[column_title(metric)] = mean_cell(study.by_seed(metric)[name].dropna(), metric)
        row["difference, combined reward"] = difference_cell(
            reward, name, study.base_of(name), "combined_reward"
        )
        if times is not None:
            of_runs = of_group(times, name)
            row["collapsed"] = f"{of_runs.notna().sum()} of {len(of_runs)}" if len(of_runs) else ""
        rows.append(row)
    return rows


def ends_by_agent(study: Study) -> Rows:
    """By agent: the metrics at the end of training."""
    rows = []
    for (name, agent), label in labels(study).items():
        values = study.final[(study.final["group"] == name) & (study.final["agent"] == agent)]
        row = {"agent": label, "n": str(len(values))}
        rows.append(
            row | {column_title(metric): mean_cell(values[metric], metric) for metric in METRICS}
        )
    return rows


def points(study: Study) -> pd.DataFrame:
    """By run, the end of training: family, value, seed and the metrics, mean over agents but frozen ones."""
    final = study.without_frozen(study.final)
    means = final.groupby(RUN, sort=False)[METRICS].mean().reset_index()
    return means.merge(study.runs[[*RUN, "family", "value"]], on=RUN)
