"""A model's text where it is shown: nothing in it acts as Markdown, as HTML or on a terminal."""

import re

ACTING = "<>&|`*_[]#~\\$"  # characters that mean something in Markdown or HTML


def one_line(text: str) -> str:
    """The text with control characters, line breaks among them, shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """The text with its line breaks; all other control characters are shown as escapes."""
    return "\n".join(one_line(line) for line in text.split("\n"))


def markdown(text: str) -> str:
    """The text as one line of Markdown that shows it as it is."""
    text = one_line(text)
    # As in agent_1.
    harmless = {match.start() for match in re.finditer(r"(?<=[^\W_])_(?=[^\W_])", text)}
    characters = []
    for position, character in enumerate(text):
        acts = character in ACTING and position not in harmless
        characters.append(f"&#{ord(character)};" if acts else character)
    return "".join(characters).strip()
