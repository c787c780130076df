"""Tidy data frames of an experiment's runs, for tables, figures and claims.

| frame | one row per | columns | file |
|---|---|---|---|
| `runs` | run | group, seed, varied settings, code version, machine, seconds | runs.csv |
| `metrics` | run, iteration and role | the metrics | metrics.csv.gz |
| `final` | run and agent | means over the last iterations | final.csv |
| `held_out` | run and way of answering | the metrics on held-out queries | held_out.csv |

A run is identified by its `group` and `seed`. Runs of a group differ only in their seed; groups of a `family` differ
only in the value of one setting, which the column `over` names. The files hold six significant digits. With them, the
runs' folders are no longer needed.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from cory.config import role_name
from cory.errors import UserError, one_of
from cory.run.folder import read_rows, write_bytes
from cory.run.settings import flat, read_settings

LAST = 10  # iterations averaged into a final value
RUN = ["group", "seed"]
# Stored for all runs; the combined reward is computed from them.
STORED = ["task_reward", "kl", "distinct_2", "response_tokens"]
TEAM = "team_reward"
# Stored if runs have them.
OPTIONAL = (
    TEAM,
    "explained_variance",
    "gradient_norm",
    "dropped_steps",
    "frac_reward_zero_std",
)
METRICS = ["task_reward", "kl", "combined_reward", "distinct_2", "response_tokens"]
FINGERPRINT = ["reward", "reward_sha256", "dataset_sha256", "rows"]
SHORTEST = "sampling.min_new_tokens"  # lower bound of the randomly drawn response lengths
LIMIT = "sampling.max_new_tokens"  # upper bound of the response lengths
KL_GUARD = "guards.stop_at_kl"  # `stopped_by` of runs that this guard ended
NUMBERS = {
    "seed": "Int64",
    "iterations": "Int64",
    "planned": "Int64",  # number of iterations
    **dict.fromkeys(["eta", "kl_bound", "seconds"], float),
}
HELD_OUT = [*RUN, "answers", "agent", "calls"]  # columns of `held_out` that are not metrics
METRICS_FILE = "metrics.csv.gz"
FRAMES = ("runs", "metrics", "final", "held_out")
Run = tuple[str, int | None]  # group and seed
BASE = "base (untrained)"  # the group of the untrained model's held-out rows, which have no seed


@dataclass
class Study:
    """All runs of an experiment; the module's docstring describes the frames."""

    runs: pd.DataFrame
    metrics: pd.DataFrame
    final: pd.DataFrame
    held_out: pd.DataFrame

    @property
    def names(self) -> list[Run]:
        """The group and the seed of each run."""
        return runs_of(self.runs)

    @property
    def over(self) -> str | None:
        """The key whose values distinguish the groups of a family, or None."""
        keys = self.runs["over"].replace("", None).dropna().unique()
        return str(keys[0]) if len(keys) else None

    @property
    def groups(self) -> list[str]:
        """The names of the groups, in order."""
        return list(self.runs["group"].unique())

    @property
    def baseline(self) -> str:
        """The group, or the family, with which others are compared.

        Raises:
            UserError: no run of the baseline has ended.
        """
        column = "family" if self._baseline_is_family else "group"
        return str(self._baseline_runs[column].iloc[0])

    @property
    def _baseline_runs(self) -> pd.DataFrame:
        base = self.runs[self.runs["baseline"]]
        if base.empty:
            raise UserError(
                f"baseline: expected at least one of its runs to have ended, got only runs of {self.groups}"
            )
        return base

    @property
    def _baseline_is_family(self) -> bool:
        """Whether groups are compared with the baseline family's group that has the same value of the varied setting.

        True even if only runs with one such value have ended.
        """
        base = self.runs[self.runs["baseline"]]
        family_runs = self.runs[self.runs["family"].isin(base["family"])]
        return bool(family_runs["baseline"].all() and (base["group"] != base["family"]).any())

    @property
    def eta(self) -> float | None:
        """The eta of the combined reward; None if each run has its own, for example if eta is varied."""
        if self.over == "ppo.init_kl_coef" or not self.runs["baseline"].any():
            return None
        return float(self.runs.loc[self.runs["baseline"], "eta"].iloc[0])

    @property
    def first_role(self) -> str:
        """The name of the role that answers the query alone in the baseline's runs.

        Raises:
            UserError: no run of the baseline has ended.
        """
        return str(self._baseline_runs["first_role"].iloc[0])

    @property
    def drawn_length(self) -> float | None:
        """The mean of the randomly drawn response lengths, in tokens; None if runs have a fixed length."""
        limits = self.runs[[SHORTEST, LIMIT]].astype(float)
        if (limits[SHORTEST] == limits[LIMIT]).all():
            return None
        return float(limits.mean(axis=1).mean())

    @property
    def ended_early(self) -> pd.DataFrame:
        """The runs that a guard or a callback ended before their planned iterations."""
        return self.runs[self.runs["stopped_by"] != ""]

    def of_seeds(self, seeds: Sequence[int]) -> "Study":
        """Returns the runs of some seeds, and the untrained model's held-out rows, which have no seed."""
        without_seed = self.held_out["seed"].isna()
        return Study(
            runs=self.runs[self.runs["seed"].isin(seeds)],
            metrics=self.metrics[self.metrics["seed"].isin(seeds)],
            final=self.final[self.final["seed"].isin(seeds)],
            held_out=self.held_out[without_seed | self.held_out["seed"].isin(seeds)],
        )

    def of_role(self, role: str) -> "Study":
        """Returns the study with the metrics of one role only, attributed to one agent named after the role.

        Raises:
            UserError: no run has the role.
        """
        one_of("--role", list(self.metrics["role"].unique()), role)
        metrics = self.metrics[self.metrics["role"] == role].assign(agent=role)
        return replace(self, metrics=metrics)

    def against(self, baseline: str) -> "Study":
        """Returns the study with another baseline, a group or a family.

        Raises:
            UserError: no group or family has that name.
        """
        one_of("--baseline", [*self.groups, *self.runs["family"].unique()], baseline)
        is_baseline = (self.runs["group"] == baseline) | (self.runs["family"] == baseline)
        return with_combined_reward(replace(self, runs=self.runs.assign(baseline=is_baseline)))

    def of_runs(self, runs: Sequence[Run]) -> "Study":
        """Returns the rows of some runs, in the order of `runs`."""
        position = {run: number for number, run in enumerate(runs)}
        frames = []
        for name in FRAMES:
            frame = getattr(self, name)
            positions = pd.Series([position.get(run) for run in runs_of(frame)], dtype=float)
            order = positions.dropna().sort_values(kind="stable").index
            frames.append(frame.iloc[order].reset_index(drop=True))
        return Study(*frames)

    def base_of(self, name: str) -> str | None:
        """Returns the name of a group's baseline, or None if no run of the baseline has ended.

        If the baseline is a family, this is its group with the same value of `over`, or its group without a value.
        """
        base = self.runs[self.runs["baseline"]]
        if self._baseline_is_family:
            value = self.runs.loc[self.runs["group"] == name, "value"].iloc[0]
            base = base[(base["value"] == value) | (base["value"] == "")]
        return str(base["group"].iloc[0]) if len(base) else None

    def without_frozen(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Leaves out rows of agents that are frozen while others in their run learn.

        A frozen agent is recognised by a final KL of 0: no update measures its KL, so 0 is recorded.
        """
        learns = self.final["kl"] != 0
        any_learns = learns.groupby([self.final[key] for key in RUN]).transform("any")
        agent = [*RUN, "agent"]
        frozen = pd.MultiIndex.from_frame(self.final.loc[~learns & any_learns, agent])
        return rows[~pd.MultiIndex.from_frame(rows[agent]).isin(frozen)]

    def by_seed(self, metric: str) -> pd.DataFrame:
        """Returns a metric at the end of training, averaged over a run's agents: a column per group, a row per seed.

        Agents that are frozen while others learn are left out.
        """
        means = self.without_frozen(self.final).groupby(["seed", "group"])[metric].mean()
        return means.unstack("group").reindex(
            columns=[name for name in self.groups if name in set(self.final.group)]
        )


def of_run(folder: Path, columns: Mapping[str, Any]) -> Study:
    """Reads the frames of a run that has ended. The combined reward uses the run's own eta.

    Args:
        folder: the run's folder.
        columns: further columns of `runs`: `group`, `family`, ...

    Raises:
        UserError: the folder is not a run's, the run has not ended, or its metrics are missing.
    """
    settings = read_settings(folder)
    if not (folder / "summary.json").exists():
        raise UserError(f"{folder}: expected a run that has ended, got one without a summary.json")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    recorded = read_rows(folder / "metrics.jsonl")
    if not recorded:
        raise UserError(f"{folder}: expected lines in its metrics.jsonl, got none")
    iterations = 1 + max(values["iteration"] for values in recorded)
    if iterations != summary["iterations"]:
        raise UserError(
            f"{folder}: expected a run that has ended, got one that is being extended: its agents are of iteration "
            f"{summary['iterations']}, its metrics go on to {iterations}. --resume continues it"
        )
    fingerprint = settings.get("fingerprint") or {}
    versions = settings.get("versions") or {}
    row = {
        **columns,
        "run": folder.name,
        "version": versions.get("commit", "unknown"),
        "machine": versions.get("machine", ""),
        "iterations": iterations,
        "planned": settings["iterations"],
        "seconds": sum(
            line["seconds_total"] + line.get("seconds_evaluate", 0.0)
            for line in read_rows(folder / "timings.jsonl")
        ),
        "stopped_by": summary.get("stopped_by", ""),
        **{f"fingerprint.{key}": str(fingerprint.get(key, "")) for key in FINGERPRINT},
    }
    optional = [key for key in OPTIONAL if any(key in values for values in recorded)]
    keys = ["iteration", "agent", "role", *STORED, *optional]
    rows = [
        {"group": row["group"], "seed": row["seed"], **{key: values.get(key) for key in keys}}
        for values in recorded
    ]
    return assemble(pd.DataFrame([row]), pd.DataFrame(rows))


def described(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of `runs` that follow from a run's settings."""
    values = flat(settings)
    roles = settings.get("roles") or [{}]
    return {
        "seed": settings["seed"],
        "first_role": roles[0].get("name") or role_name(0),  # the role that answers the query alone
        "fixed_roles": values["cory.exchange_period"] == 0,
        "eta": values["ppo.init_kl_coef"],
        "kl_bound": values["guards.kl_bound"],
        SHORTEST: str(values[SHORTEST]),
        LIMIT: str(values[LIMIT]),
    }


def assemble(
    runs: pd.DataFrame,
    metrics: pd.DataFrame,
    final: pd.DataFrame | None = None,
    held_out: pd.DataFrame | None = None,
) -> Study:
    """Makes a study from frames and adds the combined reward. A missing `final` is computed from `metrics`."""
    runs = runs.astype(NUMBERS)
    if final is None:
        final = final_values(metrics)
    if held_out is None:
        held_out = pd.DataFrame(columns=HELD_OUT)
    frames = [frame.astype({"seed": "Int64"}) for frame in (metrics, final, held_out)]
    return with_combined_reward(Study(runs, *frames))


def with_combined_reward(study: Study) -> Study:
    """Adds the combined reward, with the baseline's eta for all runs (`Study.eta`).

    Held-out rows keep their combined reward if the evaluation's command names an eta. Otherwise, the evaluation
    used the eta of the run evaluated first, so the combined reward is computed again as in training.
    """
    eta_of_run = study.runs.drop_duplicates(RUN).set_index(RUN)["eta"]

    def with_reward(frame: pd.DataFrame, kl: str) -> pd.DataFrame:
        eta = study.eta
        if eta is None:
            # The untrained model has no eta, and needs none: its KL is 0.
            eta = eta_of_run.reindex(pd.MultiIndex.from_frame(frame[RUN])).fillna(0).to_numpy()
        earned = frame["task_reward"]
        if TEAM in frame:
            earned = earned + frame[TEAM].fillna(0)
        return frame.assign(combined_reward=earned - eta * frame[kl])

    held_out = study.held_out
    if {"combined_reward", "task_reward", "chain_kl"} <= {*held_out} and not names_eta(study):
        # The evaluation gives no combined reward to rows whose team reward is unknown.
        has_one = held_out["combined_reward"].notna()
        held_out = with_reward(held_out, "chain_kl")
        held_out["combined_reward"] = held_out["combined_reward"].where(has_one)
    return replace(
        study,
        metrics=with_reward(study.metrics, "kl"),
        final=with_reward(study.final, "kl"),
        held_out=held_out,
    )


def names_eta(study: Study) -> bool:
    """Whether the evaluations' command names the eta of the combined reward."""
    return bool(study.runs["evaluation"].str.contains("--kl_coef", regex=False).any())


def last(metrics: pd.DataFrame) -> pd.DataFrame:
    """Returns each agent's rows from the last 10 iterations in which it has a role."""
    newest_first = metrics.groupby([*RUN, "agent"])["iteration"].rank("dense", ascending=False)
    return metrics[newest_first <= LAST]


def final_values(metrics: pd.DataFrame) -> pd.DataFrame:
    """Averages metrics over the last 10 iterations and over roles: a row per run and agent."""
    stored = [*STORED, *(key for key in OPTIONAL if key in metrics)]
    by_agent = last(metrics).groupby([*RUN, "agent"], sort=False)
    return by_agent[stored].mean().reset_index()


def write_study(study: Study, folder: Path) -> None:
    """Writes the frames into a folder, and removes the file of a frame without rows."""
    stored = {
        METRICS_FILE: study.metrics.drop(columns="combined_reward"),
        "final.csv": study.final.drop(columns="combined_reward"),
        "held_out.csv": study.held_out,
        "runs.csv": study.runs,  # written last: a run with a row in this file is complete
    }
    for name, frame in stored.items():
        if not len(frame):
            (folder / name).unlink(missing_ok=True)
            continue
        content = frame.to_csv(index=False, float_format="%.6g").encode()
        if name == METRICS_FILE:
            content = gzip.compress(content, mtime=0)  # without a time, the bytes are reproducible
        write_bytes(folder / name, content)


def make_folder(flag: str, folder: Path) -> None:
    """Makes a folder for a command's output. Raises a UserError that names the command's flag if this fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag}: expected a folder, got {str(folder)!r} ({error})") from None


def read_study(folder: Path) -> Study:
    """Reads the frames that `write_study` wrote into a folder.

    Raises:
        UserError: the folder has no runs.csv.
    """
    if not (folder / "runs.csv").is_file():
        raise UserError(f"expected a folder of results, with a runs.csv, got {str(folder)!r}")
    runs = pd.read_csv(folder / "runs.csv", dtype=str, keep_default_na=False)
    truths = {key: runs[key] == "True" for key in ("baseline", "fixed_roles")}
    runs = runs.assign(**truths).replace({key: {"": None} for key in NUMBERS})
    # Names such as None, NA or 2 must stay text.
    as_text = dict.fromkeys(("group", "agent", "role", "answers"), str)
    frames = [
        pd.read_csv(folder / name, dtype=as_text, keep_default_na=False, na_values=[""])
        if (folder / name).exists()
        else None
        for name in (METRICS_FILE, "final.csv", "held_out.csv")
    ]
    metrics, final, held_out = frames
    if metrics is None:
        metrics = pd.DataFrame(columns=[*RUN, "iteration", "agent", "role", *STORED])
    return assemble(runs, metrics, final, held_out)


def runs_of(frame: pd.DataFrame) -> list[Run]:
    """Returns the run of each row; (BASE, None) for the untrained model's rows."""
    seeds = [None if pd.isna(seed) else int(seed) for seed in frame["seed"]]
    return list(zip(frame["group"], seeds, strict=True))


def join(studies: Sequence[Study]) -> Study:
    """Joins studies of different runs. The combined reward uses the joint baseline's eta."""
    frames = []
    for name in FRAMES:
        rows = [getattr(study, name) for study in studies]
        frames.append(
            pd.concat([frame for frame in rows if len(frame)] or rows[:1], ignore_index=True)
        )
    return with_combined_reward(Study(*frames))


def metric_columns(held_out: pd.DataFrame) -> list[str]:
    """Returns the columns of `held_out` that are metrics."""
    return [key for key in held_out if key not in HELD_OUT]


def passes(study: Study) -> list[int]:
    """Returns the values of k for which pass@k was measured."""
    names = [str(key) for key in study.held_out]
    return sorted(int(name.removeprefix("pass@")) for name in names if name.startswith("pass@"))


def held_out_frame(
    rows: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[str, int]]
) -> pd.DataFrame:
    """Converts the rows of an evaluation.json to the frame `held_out`.

    Args:
        rows: rows with `name`, such as `RUN/agent_2 after agent_1`, and metrics.
        groups: each run's group and seed, by its folder's name. The untrained model's rows get the group
            `base (untrained)` and no seed; rows of other models are left out.
    """
    table = []
    for row in rows:
        run, _, answers = (
            row["name"].rpartition("/") if "/" in row["name"] else ("", "", row["name"])
        )
        if run in groups:
            name, seed = groups[run]
        elif run == "" and answers.split(" ")[0] == "base":
            name, seed = BASE, None
        else:
            continue
        table.append(
            {
                "group": name,
                "seed": seed,
                "answers": answers,
                "agent": answers.split(" after ")[0],
                "calls": 1 + answers.count(" after "),
                **{
                    key: value
                    for key, value in row.items()
                    if key != "name" and not key.endswith("_ci")
                },
            }
        )
    return pd.DataFrame(table, columns=None if table else HELD_OUT).astype({"seed": "Int64"})
