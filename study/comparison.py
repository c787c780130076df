"""Makes tables of the end of training: means, and differences from the baseline.

Definitions: docs/metrics.md, "Comparison". `study/compare.py` writes the page.
"""

import pandas as pd

from cory.run.tables import natural
from study.cells import Rows, column_title, difference_cell, mean_cell
from study.collapse import collapse_times
from study.equal_reward import of_group
from study.frame import METRICS, RUN, Study


def labels(study: Study) -> dict[tuple[str, str], str]:
    """Returns each learning agent's label: its group's name, with the agent's name if several agents learn."""
    final = study.without_frozen(study.final)
    result = {}
    for name in study.groups:
        agents = natural(final.loc[final["group"] == name, "agent"].unique())
        method, _, setting = name.partition(", ")
        for agent in agents:
            result[name, agent] = ", ".join([f"{method} {agent}", *([setting] if setting else [])])
        if len(agents) == 1:
            result[name, agents[0]] = name
    return result


def ends(study: Study) -> Rows:
    """Returns a row per group: final metrics, averaged over agents, and the difference from the baseline.

    If the study has the metrics of all iterations, the row also counts the runs that collapsed.
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
            group_times = of_group(times, name)
            n = len(group_times)
            row["collapsed"] = f"{group_times.notna().sum()} of {n}" if n else ""
        rows.append(row)
    return rows


def ends_by_agent(study: Study) -> Rows:
    """Returns a row per learning agent: the metrics at the end of training."""
    rows = []
    for (name, agent), label in labels(study).items():
        values = study.final[(study.final["group"] == name) & (study.final["agent"] == agent)]
        row = {"agent": label, "n": str(len(values))}
        rows.append(
            row | {column_title(metric): mean_cell(values[metric], metric) for metric in METRICS}
        )
    return rows


def points(study: Study) -> pd.DataFrame:
    """Returns a row per run: family, value, seed, and final metrics averaged over all agents except frozen ones."""
    final = study.without_frozen(study.final)
    means = final.groupby(RUN, sort=False)[METRICS].mean().reset_index()
    return means.merge(study.runs[[*RUN, "family", "value"]], on=RUN)
