"""Renders a report's payload as one HTML file, within a limit of size."""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory.report.escape import one_line
from cory.run.output import replace_text

if TYPE_CHECKING:
    from jinja2 import Template

HERE = Path(__file__).parent
STYLES = ("uplot.css", "page.css")
LIBRARY = ("uplot.js",)
SCRIPTS = ("curves.js", "completions.js", "page.js")
# What the template shows; the script reads the rest.
BY_TEMPLATE = ("title", "facts", "notes", "tables", "settings")
MARK = '<a class="skip" href="#main">Skip to the report</a>'  # in every report: `page.html` has it
LIMIT = 5_000_000  # bytes of a report


def write_page(path: Path, payload: dict[str, Any]) -> None:
    """Writes a report; replaces an older one. Raises OSError, or ValueError if even without texts it is too large."""
    replace_text(path, render(payload))


def render(payload: dict[str, Any]) -> str:
    """The HTML of a payload (`cory.report.payload`), at most LIMIT bytes long: texts that do not
    fit are left out.

    No text of the payload can act as HTML: the template escapes, and so does the JSON that the
    script reads. A policy in the page forbids the network and every script and style but the page's
    own.
    """
    for fitted in _fewer_texts(payload):
        page = _render(fitted)
        if len(page.encode()) <= LIMIT:
            return page
    raise ValueError(
        f"expected a report of at most {LIMIT} bytes, got {len(page.encode())} without texts"
    )


def _render(payload: dict[str, Any]) -> str:
    from markupsafe import Markup

    style = _sources(STYLES)
    scripts = [_sources(LIBRARY), _sources(SCRIPTS)]
    hashes = " ".join(map(_hash, scripts))
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {hashes}; base-uri 'none'; form-action 'none'"
    data = {key: value for key, value in payload.items() if key not in BY_TEMPLATE}
    return _template().render(
        payload=payload,
        data=data,
        policy=policy,
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
    )


@cache
def _template() -> "Template":
    # Here, as a run needs them only at its end.
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters["literal"] = lambda value: one_line(str(value))
    return environment.get_template("page.html")


def _sources(names: Sequence[str]) -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _fewer_texts(payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The payload with all of its queries, then with half of them, evenly spaced, a quarter, ..., and none."""
    count = len(payload["queries"])
    while True:
        kept = (
            {round(i * len(payload["queries"]) / count) for i in range(count)} if count else set()
        )
        chains = [chain for chain in payload["chains"] if chain["query"] in kept]
        queries = [
            query if number in kept else "" for number, query in enumerate(payload["queries"])
        ]
        yield payload | {
            "chains": chains,
            "queries": queries,
            "left_out": len(payload["chains"]) - len(chains),
        }
        if count == 0:
            return
        count //= 2
