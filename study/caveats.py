"""What makes a comparison weaker than it looks: runs that failed or ended early, other seeds, rewards, versions."""

import pandas as pd

from study.frame import Study
from study.records import short_version


def caveats(study: Study) -> list[str]:
    """Everything that makes the comparison weaker than it looks."""
    notes = _other_rewards(study)
    for name in study.groups:
        notes += _of_group(study, name)
    return [
        *notes,
        *_ended_early(study),
        *_several_versions(study),
        *_unequal_lengths(study),
    ]


def _of_group(study: Study, name: str) -> list[str]:
    """What is wrong with the runs of a group, and how its seeds differ from those of its baseline."""
    runs = study.runs[study.runs["group"] == name]
    notes = [
        f"{name}, {run}: {problem}"
        for run, problems in zip(runs["run"], runs["problems"], strict=True)
        for problem in problems.split("; ")
        if problem
    ]
    whole = runs[runs["problems"] == ""]
    if not len(whole):
        return [*notes, f"{name}: no run ended; the group is left out of the tables"]
    if len(whole) == 1:
        notes.append(f"{name}: a single run, so there is no interval")
    base = study.base_of(name)
    if base is None:
        notes.append(
            f"{name}: no run of the baseline {study.baseline} ended at this value, so no difference"
        )
    else:
        ours, theirs = _seeds(study, name), _seeds(study, base)
        common = sorted(ours & theirs)
        over = f"over {common}" if len(common) > 1 else "unpaired, over all seeds of both"
        if ours != theirs:
            notes.append(f"{name}, {base}: seeds differ; their differences are {over}")
    repeated = whole["seed"][whole["seed"].duplicated()]
    if len(repeated):
        notes.append(
            f"{name}: seed {repeated.iloc[0]} occurs more than once; such runs are not repetitions"
        )
    return notes


def _seeds(study: Study, name: str) -> set[int]:
    """The seeds of a group's runs that count."""
    return {int(seed) for seed in study.whole.loc[study.whole["group"] == name, "seed"]}


def _ended_early(study: Study) -> list[str]:
    """A caveat for each run that a guard or a callback has ended."""
    return [
        f"{run.group}, {run.run}: ended early, after iteration {run.iterations}"
        f"{'' if pd.isna(run.planned) else f' of {run.planned}'}, by {run.stopped_by or 'a callback'}; tables are of "
        "the agents of the end, not of the best"
        for run in study.ended_early.itertuples()
    ]


def _several_versions(study: Study) -> list[str]:
    versions = sorted(set(study.whole["version"]))
    if len(versions) < 2:
        return []
    return [f"runs of several code versions: {', '.join(map(short_version, versions))}"]


def _unequal_lengths(study: Study) -> list[str]:
    if study.whole["iterations"].nunique() < 2:
        return []
    lengths = study.whole.groupby("group", sort=False)["iterations"].unique()
    text = "; ".join(
        f"{name} {', '.join(map(str, sorted(values)))}" for name, values in lengths.items()
    )
    return [
        f"runs of unequal length in iterations ({text}): final values are of each run's own end"
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
