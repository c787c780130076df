"""A model's text where it is shown: nothing in it acts as Markdown, as HTML or on a terminal."""

import re

MARKUP = "<>&|`*_[]#~\\$"  # characters that mean something in Markdown or HTML
# Characters that act on their surroundings: control characters, those that turn the direction of
# writing, line separators, lone surrogates, and tags, which carry text that nobody sees. Spaces of other widths and the
# joiners of Persian words and of emoji are part of a text.
ACTING = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
    r"|[\U000e0000-\U000e007f]"
)


def one_line(text: str) -> str:
    """The text with characters that act on their surroundings, line breaks among them, shown as escapes."""
    return ACTING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable(text: str) -> str:
    """The text with its line breaks; all other characters that act are shown as escapes."""
    return "\n".join(one_line(line) for line in text.split("\n"))


def markdown(text: str) -> str:
    """The text as one line of Markdown that shows it as it is."""
    text = one_line(text)
    # As in agent_1.
    harmless = {match.start() for match in re.finditer(r"(?<=[^\W_])_(?=[^\W_])", text)}
    characters = []
    for position, character in enumerate(text):
        is_markup = character in MARKUP and position not in harmless
        characters.append(f"&#{ord(character)};" if is_markup else character)
    return "".join(characters).strip()
