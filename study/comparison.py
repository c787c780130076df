"""Compares the groups of a study: tables of the end of training, differences to the baseline, settings and texts.

Definitions: docs/metrics.md, "Comparison". `study/compare.py` writes the page.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from study.cells import TITLES, Rows, difference_cell, mean_cell
from study.frame import FACTS, LAST, METRICS, RUN, Study, last, runs_of
from study.groups import DATA
from study.intervals import hypervolume, nondominated, over_seeds
from study.records import natural

# Iterations averaged by role: as many of each role, with the paper's exchange period of 5.
ROLE_WINDOW = 20
TEXT = 160  # characters of a sample that are shown


def labels(study: Study) -> dict[tuple[str, str], str]:
    """The label of each group's agents: the group's name, with `agent_1`, ... where there are several."""
    result = {}
    for name, rows in (
        study.metrics.groupby("group") if len(study.metrics) else study.final.groupby("group")
    ):
        agents = natural(rows["agent"].unique())
        kind, _, rest = str(name).partition(", ")
        for agent in agents:
            alone = len(agents) == 1
            result[name, agent] = (
                name if alone else f"{kind} {agent}" + (f", {rest}" if rest else "")
            )
    return result


def ends(study: Study, metrics: Sequence[str] = tuple(METRICS)) -> Rows:
    """By group: metrics at the end of training, mean over agents, the difference to the baseline, and collapses."""
    reward = study.by_seed("combined_reward")
    collapses = study.final.groupby(["group", "seed"])["collapsed"].max()
    rows = []
    for name in reward:
        base = study.base_of(name)
        row = {"group": name, "n": str(reward[name].count())}
        row |= {
            TITLES.get(metric, metric): mean_cell(study.by_seed(metric)[name].dropna(), metric)
            for metric in metrics
        }
        if "combined_reward" in metrics:
            row["difference"] = difference_cell(reward, name, base, "combined_reward")
        rows.append(row | {"collapsed": f"{collapses[name].sum()} of {len(collapses[name])}"})
    return rows


def beginnings_and_ends(study: Study) -> Rows:
    """By run: the means of its first ten iterations and of its last ten, and what ended it before its time."""
    runs = study.whole.drop_duplicates(RUN)
    stopped_by = dict(zip(runs_of(runs), runs["stopped_by"], strict=True))
    rows = []
    for (name, seed), of_run in study.whole_metrics.groupby(RUN, sort=False):
        iterations = int(of_run["iteration"].max()) + 1
        first = of_run[of_run["iteration"] < LAST]
        ends = of_run[of_run["iteration"] >= iterations - LAST]
        row = {"group": name, "seed": str(seed), "iterations": str(iterations)}
        for metric in ("task_reward", "kl", "combined_reward"):
            row[TITLES[metric]] = f"{first[metric].mean():.2f} to {ends[metric].mean():.2f}"
        rows.append(row | {"ended by": stopped_by[name, int(seed)]})
    return rows


def ends_by_agent(study: Study) -> Rows:
    """By agent: the metrics at the end of training."""
    rows = []
    for (name, agent), label in _in_order(study, labels(study)):
        values = study.final[(study.final["group"] == name) & (study.final["agent"] == agent)]
        if len(values):
            shown = {TITLES[m]: over_seeds(values[m]).plus_minus(3) for m in METRICS}
            rows.append({"agent": label, "n": str(len(values)), **shown})
    return rows


def role_heading(study: Study) -> str:
    """The heading of `ends_by_role`."""
    return f"By role, over {last_iterations(study, ROLE_WINDOW)}"


def ends_by_role(study: Study) -> Rows:
    """By agent and role: task reward and KL over the last 20 iterations, or all of a shorter run."""
    means = (
        last(study.whole_metrics, ROLE_WINDOW)
        .groupby(["group", "agent", "role", "seed"])[["task_reward", "kl"]]
        .mean()
    )
    rows = []
    for (name, agent), label in _in_order(study, labels(study)):
        if name not in means.index.get_level_values("group"):
            continue
        for role, values in means.loc[name].xs(agent, level="agent").groupby(level="role"):
            shown = {TITLES[m]: over_seeds(values[m]).plus_minus() for m in ("task_reward", "kl")}
            rows.append({"agent": label, "role": str(role), "n": str(len(values)), **shown})
    return rows


def _in_order(study: Study, named: dict[tuple[str, str], str]) -> list[tuple[tuple[str, str], str]]:
    return sorted(named.items(), key=lambda item: study.groups.index(item[0][0]))


def points(study: Study) -> pd.DataFrame:
    """By run, the end of training: family, value, seed and the metrics, mean over agents."""
    means = study.final.groupby(RUN, sort=False)[METRICS].mean().reset_index()
    return means.merge(study.runs[[*RUN, "family", "value"]].drop_duplicates(RUN), on=RUN)


def frontiers(study: Study) -> Rows:
    """By family: which of its points (task reward, -KL) no other of its points beats, and their hypervolume."""
    means = (
        points(study)
        .groupby(["family", "group", "value"], sort=False)[["task_reward", "kl"]]
        .mean()
        .reset_index()
    )
    every = list(zip(means["task_reward"], -means["kl"], strict=True))
    worst = (min(x for x, _ in every), min(y for _, y in every))
    rows = []
    for family, of_family in means.groupby("family", sort=False):
        own_points = [every[i] for i in of_family.index]
        best = (
            [of_family["value"].iloc[i] for i in nondominated(own_points)]
            if len(own_points) > 1
            else []
        )
        rows.append(
            {
                "family": str(family),
                "points": str(len(own_points)),
                "not dominated": ", ".join(best),
                "hypervolume": f"{hypervolume(own_points, worst):.4g}",
            }
        )
    return rows


def settings(study: Study) -> Rows:
    """The settings and the fingerprints in which groups differ, a column for each group."""
    runs = study.runs
    typical = runs[runs["fingerprint.reward"] != ""].groupby("group").first()
    typical = (
        typical.reindex(study.groups).combine_first(runs.groupby("group").first()).loc[study.groups]
    )
    by_length = runs.groupby("group")["iterations"].max()
    keys = [
        key for key in _setting_columns(study) if key not in DATA and _differ(typical[key], key)
    ]
    rows = [
        {"setting": key, **{name: str(typical.loc[name, key]) for name in study.groups}}
        for key in keys
    ]
    if by_length.nunique() > 1 and "iterations" not in keys:
        rows.append(
            {"setting": "iterations", **{name: str(by_length[name]) for name in study.groups}}
        )
    return rows + _data(study)


def _setting_columns(study: Study) -> list[str]:
    return [key for key in study.runs if key not in FACTS]


def _differ(values: "pd.Series[Any]", key: str) -> bool:
    """Whether groups differ; a group without a fingerprint may have any."""
    if key.startswith("fingerprint."):
        values = values[values != ""]
    return values.nunique() > 1


def _data(study: Study) -> Rows:
    """The data of each group at the first seed at which they differ; empty where they do not."""
    trained = study.runs[study.runs[DATA[0]] != ""].drop_duplicates(RUN)
    for seed, runs in trained.groupby("seed"):
        data = runs.set_index("group")[DATA[0]]
        if data.nunique() > 1:
            return [
                {
                    "setting": f"{DATA[0]} (seed {seed})",
                    **{name: data.get(name, "") for name in study.groups},
                }
            ]
    return []


def texts(study: Study) -> Rows:
    """The same queries answered by the base and by every agent of each group's first whole run."""
    named = labels(study)
    rows: Rows = []
    group_of = dict(zip(study.runs["run"], study.runs["group"], strict=True))
    seen = set()
    for record in study.records:
        name = group_of.get(record.folder.name)
        if record.problems or name is None or name in seen:
            continue
        seen.add(name)
        for agent, samples in record.samples.get("after", {}).items():
            for number, after in enumerate(samples if (name, agent) in named else []):
                if number == len(rows):
                    base = record.samples["before"][agent][number]
                    rows.append({"query": _cut(after["query"]), "base": _sample(base)})
                if _cut(after["query"]) == rows[number]["query"]:
                    rows[number][named[name, agent]] = _sample(after)
    columns = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key, "") for key in columns} for row in rows]


def _sample(sample: dict[str, Any]) -> str:
    return f"[{sample['task_reward']:+.2f}] {_cut(sample['completion'])}"


def _cut(text: str) -> str:
    return text if len(text) <= TEXT else text[: TEXT - 3] + "..."


def eta_shown(study: Study) -> str:
    """The eta of the combined reward, for a sentence."""
    return "each run's own eta" if study.eta is None else f"{study.eta:g}"


def what_is_compared(study: Study) -> str:
    """The sentences that say what the tables compare."""
    return (
        f"Values are means over n seeds ± the half-width of their 95 % interval by Student's t. Differences are to "
        f"{study.baseline}, seed by seed. Combined reward: task reward - {eta_shown(study)} * KL."
    )


def training_note(study: Study) -> str:
    """What the tables of the end of training show."""
    return (
        f"Means over {last_iterations(study, LAST)} and over a run's agents, in whatever role they were. A pair's "
        "observers have read a first answer there and a single agent has not, so training is not a comparison at "
        "equal calls."
    )


def last_iterations(study: Study, window: int) -> str:
    """The iterations at the end of runs that are averaged: at most `window` of each, all of a shorter run."""
    lengths = study.whole["iterations"].dropna()
    if not len(lengths) or lengths.min() >= window:
        return f"the last {window} iterations"
    if lengths.max() > window:
        return f"the last {window} iterations (all of a shorter run)"
    if lengths.nunique() > 1:
        return "all iterations"
    return f"all {lengths.max()} iterations" if lengths.max() > 1 else "the only iteration"
