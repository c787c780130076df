"""A run in a few numbers: each agent's means at the start and at the end of training."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 10  # iterations averaged into "start" and "end"
CURVES = ("task_reward", "kl", "combined_reward")  # the metrics that every table and figure of a run has

# By agent and metric: `start`, `end` and `change`.
Summary = dict[str, dict[str, dict[str, float]]]


def summarise(history: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> Summary:
    """The means over the first and over the last iterations: 10 of them, or half of a short run.

    Args:
        history: rows of metrics.jsonl.
        agents: their names.
    """
    result: Summary = {}
    for agent in agents:
        rows = [record for record in history if record["agent"] == agent]
        result[agent] = {}
        if not rows:  # a member of a population that has not been drawn yet
            continue
        iterations = sorted({row["iteration"] for row in rows})  # in which it had a role, or several
        window = min(WINDOW, max(1, len(iterations) // 2))
        first = iterations[:window]
        last = iterations[-window:]
        for metric in CURVES:
            start = statistics.fmean(row[metric] for row in rows if row["iteration"] in first)
            end = statistics.fmean(row[metric] for row in rows if row["iteration"] in last)
            result[agent][metric] = {"start": start, "end": end, "change": end - start}
    return result
