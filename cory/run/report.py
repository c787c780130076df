"""The report of a run: one HTML file (docs/quick_start.md). cory/evaluation/report.py makes an evaluation's report.

The template is `page.html`; jinja2 escapes its values.
"""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from cory.errors import counted
from cory.metrics import TITLES
from cory.run.folder import read_rows, write_text
from cory.run.settings import named, read_settings
from cory.run.tables import (
    ended_early,
    labelled,
    natural,
    printable,
    query_label,
    summarise,
    summarise_roles,
)

NAME = "report.html"
ITERATIONS = 25  # samples of at most this many iterations are shown, to keep the file small

Record: TypeAlias = Mapping[str, Any]


class Table(NamedTuple):
    """A table of text; its rows have equal keys."""

    title: str
    rows: Sequence[Mapping[str, str]]
    note: str = ""


@dataclass
class Page:
    """The contents of a page.

    Args:
        title: the heading.
        facts: phrases that describe what was run.
        notes: caveats.
        figure: an <svg> element (`cory.run.plots.svg`), or an empty string.
        tables: the tables below the figure.
        completions: the chains that answered each query, by the query's label. Each chain is a title
            and the roles' responses, one record per role, like the lines of samples.jsonl.
    """

    title: str
    facts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figure: str = ""
    tables: list[Table] = field(default_factory=list)
    completions: dict[str, list[tuple[str, Sequence[Record]]]] = field(default_factory=dict)

    def add_chain(self, title: str, chain: Sequence[Record]) -> None:
        query = query_label(chain[0]["query"], chain[0]["columns"])
        self.completions.setdefault(query, []).append((title, chain))

    def add_samples(
        self, method: str, folder: Path, before_after: Mapping[str, Mapping[str, Sequence[Record]]]
    ) -> None:
        """Adds a run's samples from before and after training (summary.json) and during training (samples.jsonl)."""
        stages: dict[str, Sequence[Record]] = {}
        for stage, by_agent in before_after.items():
            solo = [record for records in by_agent.values() for record in records]
            stages[f"{stage} training"] = by_agent.get("chain", solo)
        samples = read_rows(folder / "samples.jsonl")
        iterations = sorted({sample["iteration"] for sample in samples})
        for k in iterations[:: len(iterations) // ITERATIONS + 1]:
            stages[f"iteration {k + 1}"] = [
                sample for sample in samples if sample["iteration"] == k
            ]

        for stage, records in stages.items():
            by_role: dict[str, list[Record]] = {}
            for record in records:
                by_role.setdefault(record["role"], []).append(record)
            for chain in zip(*by_role.values(), strict=True):
                self.add_chain(f"{method} · {stage}", chain)


def run_page(folder: Path, method: str) -> Page:
    """Returns the page of a finished run. Raises a UserError if the folder is not a run's."""
    settings = read_settings(folder)
    rows = read_rows(folder / "metrics.jsonl")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))

    planned = settings["iterations"]
    done = len({row["iteration"] for row in rows})
    facts = [method, f"{done} of {counted(planned, 'iteration')}", f"seed {settings['seed']}"]
    page = Page(named(folder).name, facts)
    if note := ended_early(summary, planned):
        page.notes.append(note)
    page.notes += summary.get("notes", [])
    if "best" in summary:
        page.facts.append(f"best agents: after iteration {summary['best']['iterations']}, in best/")
    # Counts an agent once per iteration, even if it holds several roles.
    flagged = {(row["agent"], flag, row["iteration"]) for row in rows for flag in row["flags"]}
    flags = Counter((agent, flag) for agent, flag, _ in flagged)
    for (agent, flag), count in sorted(flags.items()):
        page.notes.append(f"{agent}: flag {flag} in {counted(count, 'iteration')}")
    from cory.run import plots  # imported late, as matplotlib is slow to import

    page.figure = plots.svg(partial(plots.plot_curves, rows, first_role=rows[0]["role"]))
    page.tables.append(start_and_end(rows))
    page.add_samples(method, folder, summary["samples"])
    return page


def start_and_end(rows: Sequence[Record]) -> Table:
    """Returns a table of each role's and agent's means at the start and end of a run."""
    agents = natural({row["agent"] for row in rows})
    means = labelled(summarise(rows, agents), summarise_roles(rows))
    cells = []
    for name, metrics in means.items():
        row = {"": name}
        for metric, values in metrics.items():
            row[TITLES[metric]] = f"{values['start']:.3f} → {values['end']:.3f}"
        cells.append(row)
    note = (
        "Means over the first 10 and the last 10 iterations; in runs shorter than 20, over the first and the last "
        "half. A single run has no interval."
    )
    return Table("Start and end", cells, note)


def write_report(folder: Path, make: Callable[[Path], Page]) -> None:
    """Writes report.html, the page that `make` returns for a folder, into the folder.

    Errors become warnings, as everything the page shows is already saved.
    """
    path = folder / NAME
    try:
        write_text(path, render(make(folder)))
    except Exception as error:
        warnings.warn(
            f"{path} could not be written ({type(error).__name__}: {error})", stacklevel=3
        )


def render(page: Page) -> str:
    """Renders a page as HTML, with all texts escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # Figures, the only Markup values, are shown as they are.
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )
    return environment.get_template("page.html").render(page=page)
