"""The rules of solver and verifier: an answer is right by its last number, a verdict if it fits the answer."""

from collections.abc import Sequence
from fractions import Fraction

from gsm8k_train.answers import correct, extract


def right(completions: list[str], role: list[str], answer: list[str]) -> list[float]:
    """1.0 where the solver's completion ends with the right number; a verdict by itself earns nothing.

    >>> right([" 15 - 43 = -28", " 28", " yes"], ["solver", "solver", "verifier"], ["-28"] * 3)
    [1.0, 0.0, 0.0]
    """
    rows = zip(completions, role, answer, strict=True)
    return [
        float(who != "verifier" and correct(text, Fraction(number))) for text, who, number in rows
    ]


def judged(chains: Sequence[Sequence[str]], answer: list[str]) -> list[float]:
    """1.0 for each chain whose verdict fits the answer that it judges, else 0.0.

    >>> judged([[" 28", " yes"], [" 28", " no"], [" -28", " yes"], [" -28", " perhaps"], [" -28"]], ["-28"] * 5)
    [0.0, 1.0, 1.0, 0.0, 0.0]
    """
    return [
        worth(chain, number, rejection=1.0) for chain, number in zip(chains, answer, strict=True)
    ]


def judged_where_few_are_right(chains: Sequence[Sequence[str]], answer: list[str]) -> list[float]:
    """The same, with 0.25 for the rejection of a wrong answer: else it would pay to reject all of a weak solver's.

    >>> judged_where_few_are_right([[" 28", " no"], [" -28", " yes"], [" -28", " no"]], ["-28"] * 3)
    [0.25, 1.0, 0.0]
    """
    return [
        worth(chain, number, rejection=0.25) for chain, number in zip(chains, answer, strict=True)
    ]


def worth(chain: Sequence[str], gold: str, rejection: float) -> float:
    """1 if the verdict accepts a right answer, `rejection` if it rejects a wrong one, else 0.

    0 also without a verdict: an evaluation rewards chains of one agent beside those of the pair.
    """
    if len(chain) == 1:
        return 0.0
    response, verdict = chain
    if correct(response, Fraction(gold)):
        return float(accepts(verdict))
    return rejection * rejects(verdict)


def accepts(verdict: str) -> bool:
    """Whether a verdict accepts the answer that it judges.

    >>> accepts(" Yes."), accepts(" no")
    (True, False)
    """
    return verdict.strip().lower().startswith("yes")


def rejects(verdict: str) -> bool:
    """Whether a verdict rejects the answer that it judges; one that says nothing neither accepts nor rejects it."""
    return verdict.strip().lower().startswith("no")


def number(completion: str) -> Fraction | None:
    """The number that a completion answers with, for votes; None if there is none.

    >>> number(" 15 - 43 = -28."), number(" yes")
    (Fraction(-28, 1), None)
    """
    return extract(completion)
