"""The page of runs with their comparison, and of evaluations (docs/report.md); `cory/report/page.py` renders it."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from cory.plural import counted
from cory.report import failure_is_a_warning
from cory.report.completions import add_run
from cory.report.contents import interval_table, read_lines, run_page, show_evaluation
from cory.report.page import Page, Table, write_page
from cory.report.plots import svg
from study import comparison, held_out, plots
from study.caveats import caveats
from study.cells import TITLES
from study.evaluated import OVER_SEEDS, rows_over_seeds
from study.frame import Study, of_records
from study.groups import group, method
from study.records import Record


def write_comparison_page(study: Study, path: Path, title: str, question: str = "") -> None:
    """Writes the page of a comparison. Warns if that fails, as its other files are written already."""
    with failure_is_a_warning(path):
        names = dict(zip(study.runs["run"], study.runs["group"], strict=True))
        groups = [names[record.folder.name] for record in study.records]
        write_page(path, runs_page(study.records, groups, study, [], title, question))


def make_page(
    runs: Sequence[Record],
    evaluations: Sequence[Path],
    title: str,
    baseline: str | None = None,
    over: str | None = None,
) -> Page:
    """The page of runs and evaluations together.

    Args:
        evaluations: folders of evaluations; one that has not ended is a caveat. baseline, over: see `study.compare`.

    Raises:
        UserError: runs of one name differ in more than their seed; there is no such baseline or key.
        OSError, ValueError, LookupError: an evaluation cannot be read.
    """
    if len(runs) == 1 and not evaluations:
        return run_page(runs[0].folder, method(runs[0].settings), runs[0].problems)
    groups = [g.name for g in group(runs, over)]
    study = of_records(runs, over, baseline) if any(not run.problems for run in runs) else None
    return runs_page(runs, groups, study, evaluations, title)


def runs_page(
    records: Sequence[Record],
    groups: Sequence[str],
    study: Study | None,
    evaluations: Sequence[Path],
    title: str,
    question: str = "",
) -> Page:
    """The page of runs with their comparison (None: no run has ended), and of evaluations.

    Args:
        groups: the name of each run's group.
    """
    page = Page(title, facts=[question] if question else [])
    runs_of: dict[str, list[Record]] = {}
    for record, name in zip(records, groups, strict=True):
        runs_of.setdefault(name, []).append(record)
    for name, runs in runs_of.items():
        ended = sum(not run.problems for run in runs)
        page.facts.append(f"{name}: {ended} of {counted(len(runs), 'run')} ended")
    if study:
        show_comparison(page, study)
    else:
        page.notes += [
            f"{run.folder.name}: {problem}" for run in records for problem in run.problems
        ]
    for folder in evaluations:
        if not (folder / "evaluation.json").exists():
            page.notes.append(f"{folder.name}: the evaluation has not ended, and is left out")
            continue
        page.tables += evaluation_over_seeds(folder)
        earlier_tables = len(page.tables)
        show_evaluation(page, folder)
        for table in page.tables[earlier_tables:]:
            table.title += f": {folder.name}"
    if len(runs_of) < len(records):
        page.facts.append("completions are those of each group's first run")
    for name, runs in runs_of.items():
        samples = read_lines(runs[0].folder / "samples.jsonl")
        add_run(page.completions, name, samples, runs[0].samples)
    return page


def show_comparison(page: Page, study: Study) -> None:
    """Adds caveats, figures and tables of a comparison."""
    page.notes += caveats(study)
    if len(study.metrics):
        page.figures.append(svg(partial(plots.plot_curves, study)))
    if len(study.held_out):
        page.figures.append(svg(partial(plots.plot_held_out, study)))
    page.tables += comparison_tables(study)


def comparison_tables(study: Study) -> list[Table]:
    """Held-out metrics, the final values of training by group, agent and role, and the settings that differ."""
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
    settings = comparison.settings(study)
    if settings:
        tables.append(as_table("Settings that differ between groups", "", settings))
    return tables


def as_table(title: str, note: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """A table from rows of equal keys."""
    return Table(title, list(rows[0]), [list(row.values()) for row in rows], note)


def evaluation_over_seeds(folder: Path) -> list[Table]:
    """The table of an evaluation's models over seeds, if there are several."""
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    rows = rows_over_seeds(evaluation["rows"])
    if not rows:
        return []
    return [
        interval_table("Held-out evaluation, over seeds", OVER_SEEDS, rows, evaluation["titles"])
    ]
