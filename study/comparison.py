"""Compares the groups of a study: tables of final values, differences to the baseline, settings, and caveats.

Definitions: docs/metrics.md, "Comparison". `study/compare.py` writes the page.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from cory.plural import counted
from study.frame import BASE, FACTS, LAST, METRICS, RUN, Study, last, runs_of
from study.groups import DATA
from study.intervals import difference, hypervolume, nondominated, over_seeds
from study.records import natural, short_version

# Iterations averaged by role: as many of each role, with the paper's exchange period of 5.
ROLE_WINDOW = 20
TEXT = 160  # characters of a sample that are shown
TITLES = {"task_reward": "task reward", "kl": "KL", "combined_reward": "combined reward", "distinct_2": "distinct-2",
          "response_tokens": "length", "distinct_1": "distinct-1", "team_reward": "team reward",
          "chain_kl": "KL, all calls", "tokens_read": "tokens read", "tokens_written": "tokens written"}  # fmt: skip
CALLS = {1: "one call", 2: "two calls"}
Rows = list[dict[str, str]]


class Answering(NamedTuple):
    """A group, and how it answers, such as `agent_2 after agent_1` or, over all orders, `two calls`."""

    group: str
    answers: str


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
            TITLES.get(m, m): over_seeds(study.by_seed(m)[name].dropna()).plus_minus()
            for m in metrics
        }
        if "combined_reward" in metrics:
            row["difference"] = _shown_difference(reward, name, base)
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


def _shown_difference(by_seed: pd.DataFrame, name: str, base: str | None, digits: int = 2) -> str:
    if base is None or base == name or base not in by_seed:
        return ""
    return difference(by_seed[name].dropna(), by_seed[base].dropna()).text(f"+.{digits}f")


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


def role_ends(
    study: Study,
    role: str | None = None,
    metrics: Sequence[str] = ("task_reward", "kl"),
    groups: Sequence[str] = (),
) -> Rows:
    """By group: metrics of a role in a run's last 10 iterations, whichever agent had it, and the differences to the
    baseline.

    Args:
        role: its name; None: the first, which answers the query alone as a single agent does.
    """
    role = role or study.first_role
    whole = study.metrics.merge(study.whole[RUN].drop_duplicates(), on=RUN)
    of_role = whole[whole["role"] == role]
    length = of_role.groupby(RUN)["iteration"].transform("max")
    ends_of_role = of_role[of_role["iteration"] > length - LAST]
    means = ends_of_role.groupby(["seed", "group"])[list(metrics)].mean().unstack("group")
    rows = []
    for name in groups or study.groups:
        if name not in means.columns.get_level_values("group"):
            continue
        row = {"group": name, "n": str(means[metrics[0]][name].count())}
        for metric in metrics:
            row[TITLES.get(metric, metric)] = over_seeds(means[metric][name].dropna()).plus_minus()
            shown = _shown_difference(means[metric], name, study.base_of(name))
            row[f"difference, {TITLES.get(metric, metric)}"] = shown
        rows.append(row)
    return rows


def _in_order(study: Study, named: dict[tuple[str, str], str]) -> list[tuple[tuple[str, str], str]]:
    return sorted(named.items(), key=lambda item: study.groups.index(item[0][0]))


def held_out(study: Study, metric: str = "combined_reward", groups: Sequence[str] = ()) -> Rows:
    """By group: a metric on held-out queries in one call and in two, with the differences to the baseline.

    One call is the mean over a run's agents, each solo. Two calls are the mean over the orders of a chain of two
    agents, or one agent that answers after itself.
    """
    rows = []
    by_calls = {calls: held_out_by_seed(study, metric, calls) for calls in CALLS}
    percent = is_share(metric)
    for name in [BASE, *(groups or study.groups)]:
        if not any(name in by_seed for by_seed in by_calls.values()):
            continue
        seeds = max(
            by_seed[name].count() if name in by_seed else 0 for by_seed in by_calls.values()
        )
        row = {"group": name, "n": "" if name == BASE else str(seeds)}
        for calls, title in CALLS.items():
            by_seed = by_calls[calls]
            values = by_seed[name].dropna() if name in by_seed else pd.Series(dtype=float)
            row[title] = (
                over_seeds(values).plus_minus(0 if percent else 2, percent) if len(values) else ""
            )
            base = None if name == BASE else study.base_of(name)
            scaled = 100 * by_seed if percent else by_seed
            shown = (
                _shown_difference(scaled, name, base, 0 if percent else 2)
                if name in by_seed
                else ""
            )
            row[f"difference, {title}"] = shown
        rows.append(row)
    return rows


def held_out_by_seed(study: Study, metric: str, calls: int) -> pd.DataFrame:
    """A metric on held-out queries, mean over a run's agents or orders: a column per group, a row per seed.

    Of a pair with fixed roles only the order in which it was trained counts.
    """
    rows = study.held_out[study.held_out["calls"] == calls]
    fixed = study.runs.loc[study.runs["fixed_roles"], "group"].unique()
    swapped = rows["group"].isin(fixed) & ~rows["answers"].map(_in_the_order_of_training).astype(
        bool
    )
    rows = rows[~swapped]
    rows = rows.assign(seed=rows["seed"].fillna(-1))  # of the base, which has none
    return rows.groupby(["seed", "group"])[metric].mean().unstack("group")


def _in_the_order_of_training(answers: str) -> bool:
    """Whether a chain, such as `agent_2 after agent_1`, begins with the first agent.

    >>> _in_the_order_of_training("agent_2 after agent_1"), _in_the_order_of_training("agent_1 after agent_2")
    (True, False)
    """
    first, *others = answers.split(" after ")[::-1]
    agents = others if first == "itself" else [first, *others]
    return agents == natural(agents)


def held_out_by_agent(study: Study, metrics: Sequence[str], groups: Sequence[str] = ()) -> Rows:
    """By group and way of answering (`agent_1`, `agent_2 after agent_1`, ...): metrics on held-out queries."""
    rows = []
    for name in [BASE, *(groups or study.groups)]:
        of_group = study.held_out[study.held_out["group"] == name]
        for answers, values in of_group.groupby("answers", sort=False):
            row = {
                "group": name,
                "answers": str(answers),
                "n": "" if name == BASE else str(len(values)),
            }
            for metric in metrics:
                percent = is_share(metric)
                measured = values[metric].dropna()
                title = TITLES.get(metric, metric)
                row[title] = (
                    over_seeds(measured).plus_minus(0 if percent else 2, percent)
                    if len(measured)
                    else ""
                )
            rows.append(row)
    return rows


def against_rivals(
    study: Study, chain: Answering, rivals: Sequence[Answering], metric: str
) -> Rows:
    """A metric on held-out queries of a group's way of answering and of its rivals', and how far each is below it."""
    percent = is_share(metric)
    digits = 0 if percent else 2
    ours = _by_seed(study, chain, metric)
    rows = []
    for rival in [chain, *rivals]:
        theirs = _by_seed(study, rival, metric)
        row = {"group": rival.group, "answers": rival.answers, "n": str(len(theirs))}
        row[TITLES.get(metric, metric)] = over_seeds(theirs).plus_minus(digits, percent)
        if rival.group == BASE:
            row["n"] = ""
            theirs = ours * 0 + theirs.iloc[0]
        scale = 100 if percent else 1
        apart = difference(scale * ours, scale * theirs).text(f"+.{digits}f")
        row[f"{chain.group} minus it"] = "" if rival == chain else apart
        rows.append(row)
    return rows


def _by_seed(study: Study, answering: Answering, metric: str) -> "pd.Series[float]":
    """A metric of a group's way of answering, by seed; the base's has a single value.

    `one call` and `two calls` are means over agents or orders (`held_out_by_seed`).
    """
    for calls, title in CALLS.items():
        if answering.answers == title:
            return held_out_by_seed(study, metric, calls)[answering.group].dropna()
    rows = study.held_out
    rows = rows[(rows["group"] == answering.group) & (rows["answers"] == answering.answers)]
    values = rows.set_index("seed")[metric].dropna()
    if not len(values):
        raise LookupError(f"no row of {answering.group!r}, {answering.answers!r}, with {metric}")
    return values


def is_share(metric: str) -> bool:
    """Whether a metric is a share, which tables show in percent."""
    return metric.startswith(("pass@", "maj@", "verified@")) or metric in (
        "greedy",
        "copied",
        "unparseable",
    )


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


def caveats(study: Study) -> list[str]:
    """Everything that makes the comparison weaker than it looks."""
    notes = _other_rewards(study)
    for name in study.groups:
        runs = study.runs[study.runs["group"] == name]
        whole = runs[runs["problems"] == ""]
        for run, problems in zip(runs["run"], runs["problems"], strict=True):
            notes += [f"{name}, {run}: {problem}" for problem in problems.split("; ") if problem]
        if not len(whole):
            notes.append(f"{name}: no run ended; the group is left out of the tables")
            continue
        if len(whole) == 1:
            notes.append(f"{name}: a single run, so there is no interval")
        base = study.base_of(name)
        ours, theirs = _seeds(study, name), _seeds(study, base)
        if base is not None and ours != theirs:
            common = sorted(ours & theirs)
            over = f"over {common}" if len(common) > 1 else "unpaired, over all seeds of both"
            notes.append(f"{name}, {base}: seeds differ; their differences are {over}")
        if base is None:
            notes.append(
                f"{name}: no run of the baseline {study.baseline} ended at this value, so no difference"
            )
        repeated = whole["seed"][whole["seed"].duplicated()]
        if len(repeated):
            notes.append(
                f"{name}: seed {repeated.iloc[0]} occurs more than once; such runs are not repetitions"
            )
    notes += _ended_early(study)
    notes += _skipped_steps(study)
    versions = sorted(set(study.whole["version"]))
    if len(versions) > 1:
        notes.append(f"runs of several code versions: {', '.join(map(short_version, versions))}")
    if study.whole["iterations"].nunique() > 1:
        lengths = study.whole.groupby("group", sort=False)["iterations"].unique()
        text = "; ".join(
            f"{name} {', '.join(map(str, sorted(values)))}" for name, values in lengths.items()
        )
        notes.append(
            f"runs of unequal length in iterations ({text}): final values are of each run's own end"
        )
    return notes


def _seeds(study: Study, name: str | None) -> set[int]:
    """The seeds of a group's runs that count."""
    return {int(seed) for seed in study.whole.loc[study.whole["group"] == name, "seed"]}


def _skipped_steps(study: Study) -> list[str]:
    """The runs in which optimizer steps were left out, as what they computed was not finite."""
    if "skipped_steps" not in study.metrics:
        return []
    notes = []
    # An agent that has several roles has a row for each, with the steps of its one update.
    of_updates = study.metrics.drop_duplicates([*RUN, "iteration", "agent"])
    for (name, seed), steps in of_updates.groupby(RUN, sort=False)["skipped_steps"].sum().items():
        if steps:
            notes.append(
                f"{name}, seed {seed}: {counted(int(steps), 'optimizer step')} left out, not finite"
            )
    return notes


def _ended_early(study: Study) -> list[str]:
    """A caveat for each run that a guard or a callback has ended."""
    return [
        f"{run.group}, {run.run}: ended early, after iteration {run.iterations}"
        f"{'' if pd.isna(run.planned) else f' of {run.planned}'}, by {run.stopped_by or 'a callback'}; tables are of "
        "the agents of the end, not of the best"
        for run in study.ended_early.itertuples()
    ]


def _other_rewards(study: Study) -> list[str]:
    """A caveat if groups were trained on different rewards, by function, its source, or a reward model."""
    keys = ["fingerprint.reward", "fingerprint.reward_sha256"]
    if "task.reward_model" in study.runs:
        keys.append("task.reward_model")
    trained = study.runs[study.runs["fingerprint.reward"] != ""].drop_duplicates("group")
    rewards = trained.groupby(keys, sort=False)["group"].agg(list)
    if len(rewards) < 2:
        return []
    parts = []
    for (function, source, *model), groups in rewards.items():
        name = function
        if model and trained[keys[:2]].drop_duplicates().shape[0] == 1:
            name += f" of {model[0]}"
        elif (trained.drop_duplicates(keys)["fingerprint.reward"] == function).sum() > 1:
            name += f" (source {source[:8]})"
        parts.append(f"{' and '.join(groups)} on {name}")
    return [f"groups were trained on different rewards, which do not compare: {'; '.join(parts)}"]


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


HELD_OUT_NOTE = (
    "Every model answers the same held-out queries. *One call*: an agent answers the query by itself (mean over a "
    "run's agents). *Two calls*: an agent answers after it has read a first answer, of the other agent (mean over "
    "both orders; with fixed roles, that of training) or, where there is one agent, its own. Compare methods at "
    "equal calls."
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
