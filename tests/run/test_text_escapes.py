"""A model's text is shown as it is, but for characters that act on their surroundings."""

import re

import pytest
from markdown_it import MarkdownIt

from cory.run.tables import markdown, markdown_table, one_line, printable

HOSTILE = "| `x` **b** <script>alert(1)</script> [l](https://example.org) \n# h $y$ \x1b[31m \\"


def test_texts_of_all_languages_are_shown_as_they_are():
    """No-break spaces of French, the space of Japanese, joiners of Persian, joined emoji."""
    for text in (
        "prix\xa0: 5\u202f€",
        "東京\u3000大阪",
        "می\u200cخواهم",
        "\U0001f469\u200d\U0001f467",
    ):
        assert one_line(text) == printable(text) == markdown(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\r\tback\x85\x9b", "\\x1b[31mred\\r\\tback\\x85\\x9b"),
        ("\u202e reversed \u2066\u200f", "\\u202e reversed \\u2066\\u200f"),
        ("a\u2028b\u2029c\ufeff", "a\\u2028b\\u2029c\\ufeff"),
        ("hidden \U000e0041", "hidden \\U000e0041"),
        ("half \ud800 of a character", "half \\ud800 of a character"),
    ],
)
def test_characters_that_act_are_shown_as_escapes(text, shown):
    assert one_line(text) == printable(text) == shown


def test_line_breaks_are_kept_where_a_text_has_lines():
    assert printable("a\nb\r\n") == "a\nb\\r\n"
    assert one_line("a\nb") == "a\\nb"
    assert markdown("a\nb") == "a&#92;nb"


def test_a_text_in_a_markdown_table_is_shown_as_it_is():
    table = markdown_table(["a", "b"], [[HOSTILE, "end"]])
    html = MarkdownIt("commonmark").enable("table").render(table)
    shown = HOSTILE.replace("\n", "\\n").replace("\x1b", "\\x1b")
    shown = shown.replace("<", "&lt;").replace(">", "&gt;")
    assert re.findall(r"<td>(.*?)</td>", html) == [shown.strip(), "end"]
