"""Reads and writes the files of an experiment's results. A run's row is written when the run ends.

A run is identified by experiment, group and seed, on every machine. Once its row is written, its folder is no longer
needed. To make the run again, delete its row in runs.csv and its folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from cory.errors import UserError
from cory.run.settings import FREE, flat
from study.experiment_file import Experiment
from study.frame import (
    BASE,
    Study,
    described,
    held_out_frame,
    join,
    of_run,
    read_study,
    write_study,
)
from study.plan import Planned, is_local_path, is_single, varied_keys
from study.run_evaluation import RunEvaluation


class Results:
    """The results of an experiment at a scale.

    Args:
        out: the folder of the files.
        experiment: the experiment.
        scale: the name of its scale.
        changes: the values set for all runs on the command line, by key.
        planned: all runs.
        evaluation: the evaluation of each run that has ended, or None.

    Raises:
        UserError: a row does not match the plan.
    """

    def __init__(
        self,
        out: Path,
        experiment: Experiment,
        scale: str,
        changes: Mapping[str, str],
        planned: Sequence[Planned],
        evaluation: RunEvaluation | None,
    ) -> None:
        self.out = out
        self.experiment = experiment
        self.scale = scale
        self.planned = planned
        self.evaluation = evaluation
        single = next((item for item in planned if is_single(item.settings)), planned[0])
        self.baseline = experiment.baseline or single.label
        local = {key for key, value in changes.items() if is_local_path(value)}
        set_for_all = [
            key for key in [*experiment.scales[scale].flags, *changes] if key not in local
        ]
        self.keys = [*varied_keys(planned), *set_for_all]
        # Machines may name models and data differently, and keys in FREE do not change what is learned.
        self.required = [
            key
            for key in changes
            if key not in {"model.name", *local, *FREE} and not key.startswith("task.")
        ]
        self.study = read_study(out) if (out / "runs.csv").exists() else None
        if self.study is not None:
            # Drops rows of runs whose row in runs.csv was deleted or not yet written.
            self.study = self.study.of_runs([(BASE, None), *self.study.names])
            self._check_rows(self.study)

    def has(self, item: Planned) -> bool:
        """Whether a run has a row."""
        return self.study is not None and (item.group, item.seed) in self.study.names

    def add_run(self, item: Planned) -> None:
        """Evaluates a run that has ended, if the experiment has an evaluation, and writes its rows.

        The untrained model's rows are those written with the first run.
        """
        new = of_run(item.folder, self.columns(item))
        if self.evaluation:
            new.held_out = held_out_frame(
                self.evaluation.rows(item), {item.folder.name: (item.group, item.seed)}
            )
        if self.study is not None:
            if BASE in set(self.study.held_out["group"]):
                new = new.of_runs(new.names)
            new = join([self.study, new])
        in_order = [(item.group, item.seed) for item in self.planned]
        self.study = new.of_runs([(BASE, None), *(run for run in in_order if run in new.names)])
        self.write()

    def write(self) -> None:
        """Writes all rows, in the order of the plan."""
        if self.study is None:
            return
        write_study(self.study, self.out)

    def _check_rows(self, study: Study) -> None:
        """Raises a UserError if a row in the folder is not in the plan, or has other settings."""
        planned = {(item.group, item.seed): item for item in self.planned}
        for run, (_, row) in zip(study.names, study.runs.iterrows(), strict=True):
            is_same = (row["experiment"], row["scale"]) == (self.experiment.name, self.scale)
            if not is_same or run not in planned:
                raise UserError(
                    f"--out: expected rows of planned runs of {self.experiment.name} at {self.scale}, got the row of "
                    f"{row['group']}, seed {row['seed']}, of {row['experiment']} at {row['scale']}"
                )
            self._check(row, planned[run])

    def _check(self, row: "pd.Series[Any]", item: Planned) -> None:
        """Raises a UserError if a run's row records settings or an evaluation that differ from the plan.

        Keys that the row lacks are skipped, except `self.required`.
        """
        planned = {key: shown(value) for key, value in flat(item.settings).items()}
        planned["evaluation"] = self.evaluation.command if self.evaluation else ""
        planned["planned"] = item.settings["iterations"]
        for key in planned.keys() & {*row.index, *self.required} - {"iterations", "seed"}:
            recorded = row.get(key, "")
            is_compared = recorded != "" or key in ("evaluation", *self.required)
            if is_compared and recorded != planned[key]:
                raise UserError(
                    f"{self.out}: expected {key} {planned[key]!r} in the row of {item.group}, seed {item.seed}, got "
                    f"{recorded!r}. Delete the row to make the run again, or name another --out"
                )

    def columns(self, item: Planned) -> dict[str, Any]:
        """Returns the columns of a run's row that follow from the plan."""
        settings = flat(item.settings)
        return {
            **described(item.settings),
            "experiment": self.experiment.name,
            "scale": self.scale,
            "group": item.group,
            "family": item.label,
            "over": self.experiment.over or "",
            "value": "" if item.value is None else str(item.value),
            "baseline": self.baseline in (item.group, item.label),
            "evaluation": self.evaluation.command if self.evaluation else "",
            **{key: shown(settings.get(key, "")) for key in self.keys},
        }


def shown(value: Any) -> str:
    """Formats a setting for a row. Absolute paths keep their last two parts, as the rest depends on the machine."""
    path = Path(value) if isinstance(value, str) else None
    return "/".join(path.parts[-2:]) if path and path.is_absolute() else str(value)
