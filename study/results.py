"""The files of an experiment's results: a row for each run, written when it ends, kept when the run's folder is gone.

A run is recognised by a hash of its settings and of the content of its models and data (`Planned.key`), also on another
machine and in another experiment's folder beside this one.
"""

import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cory.errors import UserError
from cory.plural import counted
from study.planned import FIRST_RUN, Planned
from study.records import read
from study.run_evaluation import RunEvaluation

if TYPE_CHECKING:
    import pandas as pd

    from study.frame import Study


@dataclass
class Row:
    """A run's row in a runs.csv, as far as planning needs it."""

    folder: Path
    experiment: str
    scale: str
    group: str
    seed: int
    key: str
    evaluation: str
    version: str
    seconds: float | None
    megabytes: float | None


def rows_in(folders: Sequence[Path]) -> list[Row]:
    """The rows of the runs.csv of several folders; files without a run's hash are skipped."""
    rows = []
    for folder in folders:
        if not (folder / "runs.csv").is_file():
            continue
        with open(folder / "runs.csv", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row.get("key"):
                    rows.append(
                        Row(
                            folder=folder,
                            experiment=row["experiment"],
                            scale=row["scale"],
                            group=row["group"],
                            seed=int(row["seed"]),
                            key=row["key"],
                            evaluation=row["evaluation"],
                            version=row["version"],
                            seconds=float(row["seconds"]) if row["seconds"] else None,
                            megabytes=float(row["megabytes"]) if row["megabytes"] else None,
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
    """

    out: Path
    experiment: str
    scale: str
    planned: list[Planned]
    baseline: str
    evaluation: RunEvaluation | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        beside = self.out.parent.glob("*") if self.out.parent.is_dir() else []
        folders = [self.out, *sorted(path for path in beside if path != self.out)]
        self.rows = rows_in(folders)
        by_key = {
            row.key: row
            for row in reversed(self.rows)
            if self.evaluation is None or row.evaluation == self._command
        }
        # The rows of planned runs, by the runs' folders.
        self.recorded = {
            item.folder: by_key[item.key()] for item in self.planned if item.key() in by_key
        }

    @property
    def _command(self) -> str:
        """That of the evaluation, as a column of the rows; empty: none."""
        return self.evaluation.command if self.evaluation else ""

    def check_rows(self) -> None:
        """Raises a UserError if the folder holds runs that are not of this plan, whose rows would be lost."""
        study = self.study()
        if study is None:
            return
        runs = study.runs
        planned = runs["key"].isin([item.key() for item in self.planned])
        others = runs[~(planned & (runs["evaluation"] == self._command))]
        if len(others):
            number = f"{counted(len(others), 'run')} of other settings, models, data or evaluation"
            example = f"{others['group'].iloc[0]} with seed {others['seed'].iloc[0]}"
            raise UserError(
                f"--out: expected a folder of this experiment, got {str(self.out)!r}, which has {number}, such as "
                f"{example}. Name a new folder beside it, which takes over the rows of runs that are the same; or "
                "remove that one"
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
        """The rows of this experiment, at this scale, of a run's group."""
        of = (self.experiment, self.scale, item.of.name)
        return [row for row in self.rows if (row.experiment, row.scale, row.group) == of]

    def study(self) -> "Study | None":
        """What the files hold; None before the first row."""
        from study.frame import read_study  # here and below, as importing pandas takes a while

        return read_study(self.out) if (self.out / "runs.csv").exists() else None

    def copy_rows_of_other_folders(self) -> None:
        """Takes the rows of runs that other folders hold, or this one under another name, as this experiment's.

        All rows get the columns that follow from the plan as it is now.
        """
        from study.frame import read_study

        sources: dict[Path, Study] = {}
        parts = []
        for item in self.planned:
            row = self.recorded.get(item.folder)
            if row is None or (row.folder, row.group) == (self.out, item.of.name):
                continue
            if row.folder not in sources:
                sources[row.folder] = read_study(row.folder)
            parts.append(self._renamed(sources[row.folder], row, item))
        self.write(parts)

    def _renamed(self, source: "Study", row: Row, item: Planned) -> "Study":
        """One run of another experiment under this one's names."""
        import pandas as pd

        from study.frame import BASE, Study

        frames = []
        for frame in (source.runs, source.metrics, source.final, source.held_out):
            of_run = frame[(frame["group"] == row.group) & (frame["seed"] == row.seed)]
            frames.append(of_run.assign(group=item.of.name))
        runs, metrics, final, held_out = frames
        base = source.held_out[source.held_out["group"] == BASE]
        if not self.evaluation:
            held_out = held_out[:0]
            base = base[:0]
        return Study(self._complete(runs, item), metrics, final, pd.concat([base, held_out]))

    def add_run(self, item: Planned, seconds: float | None, megabytes: float | None) -> None:
        """Writes the rows of a run that has ended, after its evaluation, if the experiment has one.

        The first run that a folder gets is kept to be repeated (`study/check_results.py`).
        """
        self.write([self.frames_of(item, seconds, megabytes)])
        if self.threads is not None and not self._has_first_run():
            from study import check_results  # imports torch, which takes seconds

            check_results.keep(item.folder, self.out, item.key(), self.threads)

    def _has_first_run(self) -> bool:
        """Whether the folder keeps the first run, and of this plan."""
        path = self.out / FIRST_RUN
        if not path.exists():
            return False
        key = json.loads(path.read_text(encoding="utf-8"))["key"]
        return key in {item.key() for item in self.planned}

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
        columns = described(
            item.settings, item.of, item.over, self._is_baseline(item), self._varied
        )
        columns |= {"experiment": self.experiment, "scale": self.scale, "key": item.key()}
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

        from study.frame import BASE, RUN, with_combined_reward, write_study

        merged = self._with_earlier(new)
        if merged is None:
            return
        kept = {
            (item.of.name, item.seed): item
            for item in self.planned
            if self._has_row_of(merged.runs, item)
        }
        study = merged.of_runs([(BASE, None), *kept] if self.evaluation else list(kept))
        if kept:
            row_of = dict(list(study.runs.groupby(RUN)))
            rows = [self._complete(row_of[run], item) for run, item in kept.items()]
            study.runs = pd.concat(rows, ignore_index=True)
        self.out.mkdir(parents=True, exist_ok=True)
        write_study(with_combined_reward(study), self.out)
        self.rows = rows_in([self.out]) + [row for row in self.rows if row.folder != self.out]

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

    def _has_row_of(self, runs: "pd.DataFrame", item: Planned) -> bool:
        """Whether a planned run is among some rows, with its settings and the evaluation of this experiment."""
        of_run = runs[(runs["group"] == item.of.name) & (runs["seed"] == item.seed)]
        is_same = (of_run["key"] == item.key()) & (of_run["evaluation"] == self._command)
        return bool(is_same.any())
