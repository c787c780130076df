"""What the pages of a run and of an evaluation show, read from their folders."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import cory.report.plots as plots
from cory.plural import counted
from cory.report.completions import add_evaluation, add_run
from cory.report.ending import explained_end
from cory.report.page import Page, Table
from cory.report.summary import averaged, labelled, summarise, summarise_roles
from cory.report.tables import interval_cell
from cory.run.settings import read_settings

ENDS = ("start", "end", "change")


def run_page(folder: Path, method: str, notes: Sequence[str] = ()) -> Page:
    """The page of a run, which need not have ended. `notes`: caveats. Raises a UserError if the folder is no run's."""
    settings = read_settings(folder)
    rows = read_lines(folder / "metrics.jsonl")
    summary: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    planned = settings["iterations"]
    done = len({row["iteration"] for row in rows})
    page = Page(
        folder.name,
        facts=[
            method,
            f"model {' and '.join(model_names(settings))}",
            f"{done} of {counted(planned, 'iteration')}",
            f"seed {settings['seed']}",
        ],
        notes=[
            *notes,
            *explained_end(folder, summary, planned),
            *flags(rows),
        ],
    )
    if rows:
        draw = partial(plots.plot_curves, rows, first_role=rows[0]["role"])
        page.figures.append(plots.svg(draw))
        page.tables.append(_start_and_end(rows))
    samples = read_lines(folder / "samples.jsonl")
    add_run(page.completions, method, samples, summary.get("samples", {}))
    return page


def evaluation_page(folder: Path) -> Page:
    """The page of an evaluation that has ended. Raises OSError, ValueError or LookupError if it has not."""
    page = Page(folder.name)
    show_evaluation(page, folder)
    return page


def show_evaluation(page: Page, folder: Path) -> None:
    """Adds an evaluation's metrics, what a query costs where there are chains, and its completions."""
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    page.facts.append(evaluation["said"])
    note = "Mean ± half-width of the 95 % interval over queries."
    rows = evaluation["rows"]
    page.tables.append(interval_table("Held-out evaluation", note, rows, evaluation["titles"]))
    if evaluation.get("costs"):
        page.tables.append(interval_table("Cost of a query", note, rows, evaluation["costs"]))
    responses = read_lines(folder / "responses.jsonl")
    records = {(record["model"], record["query"]): record for record in responses}
    add_evaluation(page.completions, evaluation["queries"], records)


def interval_table(
    title: str, note: str, rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]
) -> Table:
    """A table of an evaluation's rows: `name`, and each metric with its interval."""
    cells = [[row["name"], *(interval_cell(row, metric) for metric in titles)] for row in rows]
    return Table(title, ["model", *titles.values()], cells, note)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file, without a line cut short by a kill; none if there is no file."""
    rows = []
    with suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").split("\n"):
            with suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def model_names(settings: Mapping[str, Any]) -> list[str]:
    """The models of a run's agents, by name, each once."""
    common = settings["model"]["name"]
    agents = settings.get("agents") or [{}]
    names = [(agent.get("model") or {}).get("name", common) for agent in agents]
    return list(dict.fromkeys(names))


def flags(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Signs of trouble (docs/metrics.md, `flags`) by agent, with what they mean where KL was largest."""
    flagged: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        for flag in row.get("flags") or []:
            flagged.setdefault((row["agent"], flag), []).append(row)
    if not flagged:
        return []
    from cory.run.flags import MEANING  # here, as importing torch takes seconds

    notes = []
    for (agent, flag), of_flag in flagged.items():
        worst = max(of_flag, key=lambda row: row["kl"])
        meaning = MEANING[flag].format_map(worst) if flag in MEANING else flag
        iterations = counted(len(of_flag), "iteration")
        notes.append(f"{agent}, {iterations} from {of_flag[0]['iteration']} on: {meaning}")
    return notes


def _start_and_end(rows: Sequence[Mapping[str, Any]]) -> Table:
    agents = sorted({row["agent"] for row in rows}, key=lambda name: (len(name), name))
    cells = [
        [
            f"{name}: {plots.CURVE_TITLES.get(metric, metric)}",
            *(f"{values[key]:.3f}" for key in ENDS),
        ]
        for name, metrics in labelled(summarise(rows, agents), summarise_roles(rows)).items()
        for metric, values in metrics.items()
    ]
    window = averaged(len({row["iteration"] for row in rows}))
    ends = "iteration" if window == 1 else f"{window} iterations"
    note = f"Means over the first and the last {ends}. A single run has no interval."
    return Table("Start and end", ["role or agent, metric", *ENDS], cells, note)
