"""Runs, comparisons and evaluations as one HTML file (docs/report.md); the page itself is made by `cory/report/`."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cory.report.completions import Texts
from cory.report.page import write_page
from cory.report.payload import ReportedRun, evaluation_parts, interval_table, of_run, payload, read_lines
from study.comparison import ROLE_WINDOW, Comparison
from study.groups import Group, group, method
from study.measures import LAST
from study.records import Record
from study.tables import eta_shown, final_table, group_table, method_note, over_seeds

OVER_SEEDS = "Mean ± standard deviation over seeds; a model without seeds has its own interval."


def write_comparison_page(comparison: Comparison, path: Path, title: str, question: str = "") -> None:
    """Writes the report of a comparison. Warns if that fails, as its other files are written already."""
    try:
        write_page(path, runs_payload(comparison.groups, comparison, [], title, question))
    except Exception as error:
        warnings.warn(f"{path} could not be written ({type(error).__name__}: {error})", stacklevel=2)


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
    groups = group(runs, over)
    comparison = Comparison(groups, baseline, over) if any(each.whole for each in groups) else None
    return runs_payload(groups, comparison, evaluations, title)


def runs_payload(
    groups: Sequence[Group],
    comparison: Comparison | None,
    evaluations: Sequence[Path],
    title: str,
    question: str = "",
) -> dict[str, Any]:
    """The payload of groups of runs with their comparison (None: no run has ended), and of evaluations."""
    runs = [
        ReportedRun(
            run.folder.name, g.name, run.settings, run.rows, read_lines(run.folder / "samples.jsonl"), run.samples
        )
        for g in groups
        for run in g.runs
    ]
    facts = [f"{g.name}: {len(g.whole)} of {len(g.runs)} runs ended" for g in groups]
    notes, tables, settings, texts = [], [], None, Texts()
    if comparison:
        notes, tables, settings = comparison.problems(), comparison_tables(comparison), settings_table(comparison)
    elif groups:
        notes = [f"{run.folder.name}: {problem}" for g in groups for run in g.runs for problem in run.problems]
    for folder in evaluations:
        if not (folder / "evaluation.json").exists():
            notes.append(f"{folder.name}: the evaluation has not ended, and is left out")
            continue
        table, texts, said = evaluation_parts(folder, texts)
        tables += [*evaluation_over_seeds(folder), table | {"title": f"Held-out evaluation: {folder.name}"}]
        facts.append(said)
    return payload(title, [question, *facts] if question else facts, notes, runs, tables, settings, texts)


def as_table(title: str, note: str, rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """A table of the payload from rows of equal keys."""
    return {"title": title, "note": note, "columns": list(rows[0]), "rows": [list(row.values()) for row in rows]}


def comparison_tables(comparison: Comparison) -> list[dict[str, Any]]:
    """The final values by agent, group and role."""
    note = f"Mean ± standard deviation over n seeds. Combined reward: task reward - {eta_shown(comparison)} * KL."
    tables = [
        as_table(f"Last {LAST} iterations of training, by agent", note, final_table(comparison)),
        as_table("By group", method_note(comparison).strip(), group_table(comparison)),
    ]
    roles = comparison.role_rows()
    if len({row["role"] for row in roles}) > 1:
        tables.append(as_table(f"By role, last {ROLE_WINDOW} iterations", "", roles))
    return tables


def settings_table(comparison: Comparison) -> dict[str, Any] | None:
    """The settings in which groups differ."""
    title, rows = "Settings that differ between groups", comparison.setting_rows()
    if not rows:
        none = {"setting": "none", **{g.name: "" for g in comparison.groups}}
        return as_table(title, "The runs differ in their seed alone.", [none])
    return as_table(title, "All other settings are equal, apart from the seed.", rows)


def evaluation_over_seeds(folder: Path) -> list[dict[str, Any]]:
    """The table of an evaluation's models over seeds, if there are several."""
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    rows = over_seeds(evaluation["rows"])
    return [interval_table("Held-out evaluation, over seeds", OVER_SEEDS, rows, evaluation["titles"])] if rows else []
