"""Markdown tables."""

from collections.abc import Mapping, Sequence

from cory.run import tables


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of equal keys as a table; a model's text cannot act as Markdown, HTML or terminal control."""
    if not rows:
        return "None.\n"
    return f"{tables.markdown_table(list(rows[0]), [list(row.values()) for row in rows])}\n"
