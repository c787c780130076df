"""The team reward of the story: statistics of its two paragraphs alone, after CoMLRL's task of TL;DR summaries.

It knows nothing of sense or grammar: four parts of at most 1, and their mean.
"""

from collections.abc import Sequence

OPENING_WORDS = (12, 18)
ENDING_WORDS = (24, 32)
SHARED = (0.3, 0.5)  # of the ending's different words, how many also stand in the opening
TRANSITIONS = set(
    "then but so later suddenly finally however meanwhile next afterwards therefore because although instead".split()
)
ENOUGH_TRANSITIONS = 4


def story(chains: Sequence[Sequence[str]]) -> list[float]:
    """The mean of a story's `parts`, for each chain."""
    return [sum(parts(chain).values()) / 4 for chain in chains]


def parts(chain: Sequence[str]) -> dict[str, float]:
    """What the reward consists of, each from 0 to 1.

    Args:
        chain: the two paragraphs, or one text that holds both, which its first empty or new line parts.

    >>> parts(["A fox ran.", "Then a fox slept."])  # 3 of 12 words, 4 of 24, half of 4 are shared, 1 of 4 transitions
    {'opening': 0.25, 'ending': 0.16666666666666666, 'shared': 1.0, 'transitions': 0.25}
    >>> parts(["A fox ran.\\n\\nThen a fox slept."]) == parts(["A fox ran.", "Then a fox slept."])
    True
    """
    opening, ending = map(words, paragraphs(chain))
    shared = len(set(opening) & set(ending)) / max(1, len(set(ending)))
    transitions = len(TRANSITIONS & {*opening, *ending})
    return {
        "opening": within(len(opening), *OPENING_WORDS),
        "ending": within(len(ending), *ENDING_WORDS),
        "shared": within(shared, *SHARED) if ending else 0.0,
        "transitions": min(1.0, transitions / ENOUGH_TRANSITIONS),
    }


def paragraphs(chain: Sequence[str]) -> tuple[str, str]:
    """Opening and ending: the responses of two roles, or of one response its first line and the rest."""
    if len(chain) > 1:
        opening, ending = chain
        return opening, ending
    opening, _, ending = chain[0].strip().partition("\n")
    return opening, ending


def words(text: str) -> list[str]:
    """The words of a text, in small letters, without punctuation."""
    stripped = (word.strip(".,;:!?\"'()").lower() for word in text.split())
    return [word for word in stripped if word]


def within(value: float, low: float, high: float) -> float:
    """1 from `low` to `high`; below and above it falls in proportion, to 0 at 0 and at `low + high`.

    >>> within(12, 12, 18), within(6, 12, 18), within(24, 12, 18), within(40, 12, 18)
    (1.0, 0.5, 0.5, 0.0)
    """
    if value < low:
        return value / low
    if value > high:
        return max(0.0, 1 - (value - high) / low)
    return 1.0
