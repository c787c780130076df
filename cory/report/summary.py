"""A run in a few numbers: the means of each role and agent at the start and at the end of training."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 10  # iterations averaged into "start" and "end"
# The metrics that every table and figure of a run has.
CURVES = ("task_reward", "kl", "combined_reward")

# By agent or role, and by metric: `start`, `end` and `change`.
Summary = dict[str, dict[str, dict[str, float]]]


def summarise(history: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> Summary:
    """The means over the first and over the last iterations: 10 of them, or half of a short run.

    Args:
        history: rows of metrics.jsonl.
        agents: their names.
    """
    return _summary(history, "agent", agents)


def summarise_roles(history: Sequence[Mapping[str, Any]]) -> Summary:
    """As `summarise`, by role instead of agent: how the chain's responses have changed. Empty for one role."""
    roles = list(dict.fromkeys(record["role"] for record in history))
    return _summary(history, "role", roles) if len(roles) > 1 else {}


def _summary(history: Sequence[Mapping[str, Any]], key: str, names: Sequence[str]) -> Summary:
    result: Summary = {}
    for name in names:
        rows = [record for record in history if record[key] == name]
        result[name] = {}
        if not rows:  # a member of a population that has not been drawn yet
            continue
        # In which it had a role, or several.
        iterations = sorted({row["iteration"] for row in rows})
        window = min(WINDOW, max(1, len(iterations) // 2))
        first = iterations[:window]
        last = iterations[-window:]
        shown = [*CURVES[:1], "team_reward", *CURVES[1:]] if "team_reward" in rows[0] else CURVES
        for metric in shown:
            start = statistics.fmean(row[metric] for row in rows if row["iteration"] in first)
            end = statistics.fmean(row[metric] for row in rows if row["iteration"] in last)
            result[name][metric] = {"start": start, "end": end, "change": end - start}
    return result


def labelled(agents: Summary, roles: Summary) -> Summary:
    """What the tables of a run show: the roles of the chain, then its agents, each over all roles that it held."""
    rows = {f"as {role}": metrics for role, metrics in roles.items()}
    for agent, metrics in agents.items():
        rows[f"{agent}, all roles" if roles else agent] = metrics
    return rows


def ended_early(summary: Mapping[str, Any], planned: int) -> str:
    """When and by what a run ended early; empty if it did not.

    Args:
        summary: of summary.json. planned: iterations.
    """
    if not summary.get("stopped"):
        return ""
    by = summary.get("stopped_by", "a callback")
    return f"ended early, after iteration {summary['iterations']} of {planned}, by {by}"
