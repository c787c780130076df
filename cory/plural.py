"""Counts in messages."""


def counted(count: int, noun: str) -> str:
    """A count with its noun, which takes a plain plural.

    >>> counted(1, "iteration"), counted(3, "iteration")
    ('1 iteration', '3 iterations')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
