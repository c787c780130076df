"""Runs, comparisons and evaluations as one HTML file (docs/report.md); the page itself is made by `cory/report/`."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cory.plural import counted
from cory.report.completions import Texts
from cory.report.page import write_page
from cory.report.payload import (
    ReportedRun,
    evaluation_parts,
    interval_table,
    of_run,
    payload,
    read_lines,
)
from study import comparison, held_out
from study.caveats import caveats
from study.cells import TITLES
from study.evaluated import OVER_SEEDS, rows_over_seeds
from study.frame import Study, of_records
from study.groups import group, method
from study.records import Record


def write_comparison_page(study: Study, path: Path, title: str, question: str = "") -> None:
    """Writes the report of a comparison. Warns if that fails, as its other files are written already."""
    names = dict(zip(study.runs["run"], study.runs["group"], strict=True))
    try:
        groups = [names[record.folder.name] for record in study.records]
        write_page(path, runs_payload(study.records, groups, study, [], title, question))
    except Exception as error:
        warnings.warn(
            f"{path} could not be written ({type(error).__name__}: {error})", stacklevel=2
        )


def make_payload(
    runs: Sequence[Record],
    evaluations: Sequence[Path],
    title: str,
    baseline: str | None = None,
    over: str | None = None,
) -> dict[str, Any]:
    """The payload of runs and evaluations together.

    Args:
        evaluations: folders of evaluations; one that has not ended is a caveat. baseline, over: see `study.compare`.

    Raises:
        UserError: runs of one name differ in more than their seed; there is no such baseline or key.
        OSError, ValueError, LookupError: an evaluation cannot be read.
    """
    if len(runs) == 1 and not evaluations:
        return of_run(runs[0].folder, method(runs[0].settings), runs[0].problems)
    groups = [g.name for g in group(runs, over)]
    study = of_records(runs, over, baseline) if any(not run.problems for run in runs) else None
    return runs_payload(runs, groups, study, evaluations, title)


def runs_payload(
    records: Sequence[Record],
    groups: Sequence[str],
    study: Study | None,
    evaluations: Sequence[Path],
    title: str,
    question: str = "",
) -> dict[str, Any]:
    """The payload of runs with their comparison (None: no run has ended), and of evaluations.

    Args:
        groups: the name of each run's group.
    """
    runs = [
        ReportedRun(
            record.folder.name, name, record.settings, record.rows,
            read_lines(record.folder / "samples.jsonl"), record.samples,
        )
        for record, name in sorted(zip(records, groups, strict=True), key=lambda pair: groups.index(pair[1]))
    ]  # fmt: skip
    facts = []
    for name in dict.fromkeys(groups):
        members = [record for record, other in zip(records, groups, strict=True) if other == name]
        facts.append(
            f"{name}: {sum(not record.problems for record in members)} of {counted(len(members), 'run')} ended"
        )
    notes: list[str] = []
    tables: list[dict[str, Any]] = []
    settings = None
    texts = Texts()
    if study:
        notes = caveats(study)
        tables = comparison_tables(study)
        settings = settings_table(study)
    elif records:
        notes = [
            f"{record.folder.name}: {problem}" for record in records for problem in record.problems
        ]
    for folder in evaluations:
        if not (folder / "evaluation.json").exists():
            notes.append(f"{folder.name}: the evaluation has not ended, and is left out")
            continue
        of_evaluation, texts, how = evaluation_parts(folder, texts)
        tables += evaluation_over_seeds(folder)
        tables += [table | {"title": f"{table['title']}: {folder.name}"} for table in of_evaluation]
        facts.append(how)
    return payload(
        title, [question, *facts] if question else facts, notes, runs, tables, settings, texts
    )


def as_table(title: str, note: str, rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """A table of the payload from rows of equal keys."""
    return {
        "title": title,
        "note": note,
        "columns": list(rows[0]),
        "rows": [list(row.values()) for row in rows],
    }


def comparison_tables(study: Study) -> list[dict[str, Any]]:
    """Held-out metrics, and the final values of training by group, agent and role."""
    tables = []
    if len(study.held_out):
        metric = held_out.judged_by(study)
        title = f"Held out: {TITLES.get(metric, metric)}"
        rows = held_out.held_out(study, metric)
        tables.append(as_table(title, held_out.NOTE.replace("*", ""), rows))
    note = f"{comparison.training_note(study)} {comparison.what_is_compared(study)}"
    tables += [
        as_table("End of training", note, comparison.ends(study)),
        as_table("End of training, by agent", "", comparison.ends_by_agent(study)),
    ]
    if study.metrics["role"].nunique() > 1:
        heading = comparison.role_heading(study)
        tables.append(as_table(heading, "", comparison.ends_by_role(study)))
    return tables


def settings_table(study: Study) -> dict[str, Any]:
    """The settings in which groups differ."""
    title = "Settings that differ between groups"
    rows = comparison.settings(study)
    if rows:
        return as_table(title, "All other settings are equal, apart from the seed.", rows)
    none = {"setting": "none", **dict.fromkeys(study.groups, "")}
    return as_table(title, "The runs differ in their seed alone.", [none])


def evaluation_over_seeds(folder: Path) -> list[dict[str, Any]]:
    """The table of an evaluation's models over seeds, if there are several."""
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    rows = rows_over_seeds(evaluation["rows"])
    return (
        [interval_table("Held-out evaluation, over seeds", OVER_SEEDS, rows, evaluation["titles"])]
        if rows
        else []
    )
