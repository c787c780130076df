"""The HTML page of a run, an evaluation or a comparison: one file, made from page.html, page.css and search.js."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cory.report.completions import Completions
from cory.report.escape import one_line, printable
from cory.run.folder import write_text

HERE = Path(__file__).parent


@dataclass
class Table:
    """A table of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass
class Page:
    """What a page shows. All but the figures is text, and is escaped.

    Args:
        facts: what was run, in a few phrases.
        notes: caveats.
        figures: <svg> elements (`cory.report.plots.svg`).
        completions: chains of responses by query.
    """

    title: str
    facts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    completions: Completions = field(default_factory=dict)


def write_page(path: Path, page: Page) -> None:
    """Writes a page; replaces an older one."""
    write_text(path, render(page))


def render(page: Page) -> str:
    """The HTML of a page.

    No text of the page can act as HTML, as the template escapes it, and a policy forbids the network and every script
    but the search.
    """
    # Here, as a run needs them only at its end.
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"line": one_line, "text": printable}
    search = (HERE / "search.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(search.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        page=page,
        figures=[Markup(figure) for figure in page.figures],
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        search=Markup(search),
        search_hash=f"sha256-{digest}",
    )
