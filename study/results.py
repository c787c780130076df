"""The files of an experiment's results: a row for each run, written when it ends, kept when the run's folder is gone.

A run is known by experiment, group and seed, on every machine. To measure it again, delete its row in runs.csv.
"""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cory.errors import UserError
from cory.plural import counted
from study.planned import FIRST_RUN, Planned
from study.records import flat, read, shown
from study.run_evaluation import RunEvaluation

if TYPE_CHECKING:
    import pandas as pd

    from study.frame import Study


@dataclass
class Row:
    """A run's row in a runs.csv, as far as planning needs it; `columns` has all of it as texts."""

    folder: Path
    experiment: str
    scale: str
    group: str
    seed: int
    version: str
    seconds: float | None
    megabytes: float | None
    columns: dict[str, str]


def rows_in(folder: Path) -> list[Row]:
    """The rows of a folder's runs.csv that are of an experiment, and not of a comparison."""
    if not (folder / "runs.csv").is_file():
        return []
    rows = []
    with open(folder / "runs.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row.get("experiment"):
                rows.append(
                    Row(
                        folder=folder,
                        experiment=row["experiment"],
                        scale=row["scale"],
                        group=row["group"],
                        seed=int(row["seed"]),
                        version=row["version"],
                        seconds=float(row["seconds"]) if row["seconds"] else None,
                        megabytes=float(row["megabytes"]) if row["megabytes"] else None,
                        columns=row,
                    )
                )
    return rows


@dataclass
class Results:
    """The results of an experiment at a scale.

    Args:
        out: the folder of the files.
        experiment, scale: names.
        planned: all runs.
        baseline: the runs' name that others are measured against.
        evaluation: of each run that has ended; None: there is none.
        threads: of each run, where runs are made on this machine; None: no run is kept to be repeated.
        set_for_all: keys that are changed in every run, of which rows record the values.
        sources: the folders of the results of other experiments whose rows are taken, by their names.

    Raises:
        UserError: a row records other settings than those that are planned.
    """

    out: Path
    experiment: str
    scale: str
    planned: list[Planned]
    baseline: str
    evaluation: RunEvaluation | None = None
    threads: int | None = None
    set_for_all: Sequence[str] = ()
    sources: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = rows_in(self.out)
        own = self._by_run(self.rows, self.experiment)
        others = {
            name: self._by_run(rows_in(folder), name) for name, folder in self.sources.items()
        }
        self.recorded: dict[Path, Row] = {}  # the rows of planned runs, by the runs' folders
        for item in self.planned:
            run = (item.of.name, item.seed)
            row = own.get(run) or others.get(item.source or "", {}).get(run)
            if row:
                self._check(row, item)
                self.recorded[item.folder] = row

    def _by_run(self, rows: Sequence[Row], experiment: str) -> dict[tuple[str, int], Row]:
        """The rows of an experiment at this scale, by group and seed."""
        of = (experiment, self.scale)
        return {(row.group, row.seed): row for row in rows if (row.experiment, row.scale) == of}

    @property
    def _command(self) -> str:
        """That of the evaluation, as a column of the rows; empty: none."""
        return self.evaluation.command if self.evaluation else ""

    def _check(self, row: Row, item: Planned) -> None:
        """Raises a UserError if a run's row records another setting, or evaluation, than is planned."""
        settings = flat({**item.settings, "fingerprint": item.fingerprint()})
        planned = {key: shown(value) for key, value in settings.items()}
        # The column `iterations` is of those that were made.
        planned["planned"] = planned.pop("iterations")
        for key, setting in (("eta", "ppo.init_kl_coef"), ("kl_bound", "guards.kl_bound")):
            planned[key] = f"{settings[setting]:.6g}"
        planned["evaluation"] = self._command
        for key, value in planned.items():
            recorded = row.columns.get(key, "")
            if recorded != value and (recorded or key == "evaluation"):
                raise UserError(
                    f"{row.folder}: expected rows of what is planned, got one of {row.group}, seed {row.seed}, with "
                    f"{key} {recorded!r} in place of {value!r}. To measure it again, delete its row in runs.csv, or "
                    "name another folder with --out"
                )

    def check_rows(self) -> None:
        """Raises a UserError if the folder holds runs that are not of this plan, whose rows would be lost."""
        planned = list(self.recorded.values())
        others = [row for row in self.rows if row not in planned]
        if others:
            row = others[0]
            raise UserError(
                f"--out: expected a folder of this experiment, got {str(self.out)!r}, which has "
                f"{counted(len(others), 'run')} of another, such as {row.group} with seed {row.seed} of "
                f"{row.experiment}, {row.scale}. Name another folder, or remove that one"
            )

    def estimate(self, missing: Sequence[Planned]) -> tuple[float, int]:
        """The seconds of some runs one after the other, and how many of them are by the seconds of earlier runs.

        Of other runs it takes the minutes of the experiment's file. NaN: neither is known of a run.
        """
        total = 0.0
        by_rows = 0
        for item in missing:
            seconds = [row.seconds for row in self._alike(item) if row.seconds]
            by_rows += bool(seconds)
            from_file = 60 * item.minutes or float("nan")
            total += statistics.fmean(seconds) if seconds else from_file
        return total, by_rows

    def disk(self, missing: Sequence[Planned]) -> float:
        """The MB that some runs will take, by those of earlier runs of their group; NaN where there are none."""
        total = 0.0
        for item in missing:
            sizes = [row.megabytes for row in self._alike(item) if row.megabytes]
            total += statistics.fmean(sizes) if sizes else float("nan")
        return total

    def _alike(self, item: Planned) -> list[Row]:
        """The rows of a run's group."""
        taken = [row for row in self.recorded.values() if row.folder != self.out]
        return [row for row in [*self.rows, *taken] if row.group == item.of.name]

    def study(self) -> "Study | None":
        """What the files hold; None before the first row."""
        from study.frame import read_study  # here and below, as importing pandas takes a while

        return read_study(self.out) if (self.out / "runs.csv").exists() else None

    def take_rows(self) -> None:
        """Takes the rows of other experiments; all rows get the columns that follow from the plan as it is now."""
        from study.frame import BASE, read_study

        studies: dict[Path, Study] = {}
        parts = []
        for item in self.planned:
            row = self.recorded.get(item.folder)
            if row is None or row.folder == self.out:
                continue
            if row.folder not in studies:
                studies[row.folder] = read_study(row.folder)
            part = studies[row.folder].of_runs([(BASE, None), (item.of.name, item.seed)])
            part.runs = self._complete(part.runs, item)
            parts.append(part)
        self.write(parts)

    def add_run(self, item: Planned, seconds: float | None, megabytes: float | None) -> None:
        """Writes the rows of a run that has ended, after its evaluation, if the experiment has one.

        The first run that is made for a folder is kept to be repeated (`study/check_results.py`).
        """
        self.write([self.frames_of(item, seconds, megabytes)])
        if self.threads is not None and not (self.out / FIRST_RUN).exists():
            from study import check_results  # imports torch, which takes seconds

            check_results.keep(item.folder, self.out, self.threads)

    def frames_of(
        self, item: Planned, seconds: float | None = None, megabytes: float | None = None
    ) -> "Study":
        """The frames of a run that has ended, evaluated if the experiment has an evaluation."""
        from study.frame import held_out_rows, of_run

        record = read(item.folder)
        study = of_run(record, item.of, item.over, self._is_baseline(item), [])
        study.runs = self._complete(study.runs, item).assign(seconds=seconds, megabytes=megabytes)
        if self.evaluation:
            rows = self.evaluation.rows(item)
            study.held_out = held_out_rows(rows, {item.folder.name: (item.of.name, item.seed)})
        return study

    def _complete(self, runs: "pd.DataFrame", item: Planned) -> "pd.DataFrame":
        """A run's row with the columns that follow from the plan."""
        from study.frame import FACTS, FINGERPRINT, described

        runs = runs[[key for key in runs if key in FACTS or key in FINGERPRINT]]
        keys = [*self._varied, *self.set_for_all]
        columns = described(item.settings, item.of, item.over, self._is_baseline(item), keys)
        columns |= {"experiment": self.experiment, "scale": self.scale}
        return runs.assign(**columns, evaluation=self._command)

    def _is_baseline(self, item: Planned) -> bool:
        return self.baseline in (item.of.name, item.label)

    @cached_property
    def _varied(self) -> list[str]:
        """The keys of the settings in which the experiment's groups differ."""
        from study.groups import varying

        return varying(
            [item.settings for item in {item.of.name: item for item in self.planned}.values()],
            ("seed",),
        )

    def write(self, new: "Sequence[Study]") -> None:
        """Adds runs to the files, in the order of the plan; they take the place of older rows of the same runs.

        Rows of other runs go, which `check_rows` has refused before.
        """
        import pandas as pd

        from study.frame import BASE, RUN, runs_of, with_combined_reward, write_study

        merged = self._with_earlier(new)
        if merged is None:
            return
        ended = set(runs_of(merged.runs))
        kept = {
            (item.of.name, item.seed): item
            for item in self.planned
            if (item.of.name, item.seed) in ended
        }
        study = merged.of_runs([(BASE, None), *kept] if self.evaluation else list(kept))
        if kept:
            row_of = dict(list(study.runs.groupby(RUN)))
            rows = [self._complete(row_of[run], item) for run, item in kept.items()]
            study.runs = pd.concat(rows, ignore_index=True)
        self.out.mkdir(parents=True, exist_ok=True)
        write_study(with_combined_reward(study), self.out)
        self.rows = rows_in(self.out)

    def _with_earlier(self, new: "Sequence[Study]") -> "Study | None":
        """New runs and those of the files that they do not replace; None if there are neither."""
        from study.frame import BASE, join, runs_of

        parts = list(new)
        before = self.study()
        if before:
            replaced = {run for part in new for run in runs_of(part.runs)}
            others = [run for run in runs_of(before.runs) if run not in replaced]
            if others:
                # The base is that of an evaluation's first run. Begun anew, as on another machine, it may begin with
                # another run, so the base's rows are those that the runs that stay were measured with.
                parts = [part.of_runs(runs_of(part.runs)) for part in parts]
            parts.append(before.of_runs([(BASE, None), *others]))
        return join(parts) if parts else None
