"""Choosing among several responses to a query: what a chain's rivals at equal calls, and a verifier, earn."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from cory.errors import UserError

V = TypeVar("V")


def best_of_2(rewards: Sequence[float]) -> float:
    """Mean of the larger reward over all pairs: the expected reward of the better of two responses.

    >>> best_of_2([1.0, 2.0, 0.0])
    1.6666666666666667
    """
    ranked = sorted(rewards)
    return sum(rank * reward for rank, reward in enumerate(ranked)) / math.comb(len(ranked), 2)


def majority(answers: Sequence[Hashable | None]) -> int:
    """The index of the response that a vote chooses: the first that gives the most frequent answer.

    Ties go to the answer that comes first. None is no answer and no vote; without any vote the first response counts.

    >>> majority(["7", None, "5", "5"]), majority(["7", "5"]), majority([None, None])
    (2, 0, 0)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0
    winner, _ = votes.most_common(1)[0]  # of equally many votes, the answer that was counted first
    return answers.index(winner)


def first_accepted(verdicts: Sequence[bool]) -> int:
    """The index of the first response that is accepted; 0 if none is.

    >>> first_accepted([False, True, True]), first_accepted([False, False])
    (1, 0)
    """
    return verdicts.index(True) if True in verdicts else 0


def reward_at_k(
    choose: Callable[[Sequence[V]], int], values: Sequence[V], rewards: Sequence[float], k: int
) -> float:
    """Mean reward of the response that is chosen among k, over the groups of k responses, one after the other.

    Responses that do not fill a last group are left out.

    Args:
        choose: from the values of a group to the index of one of them: `majority`, `first_accepted`.
        values, rewards: of the responses to a query.

    >>> reward_at_k(majority, ["7", "5", "5", "3", "8", "8"], [0.0, 1.0, 1.0, 0.0, 0.0, 0.0], 3)
    0.5
    """
    starts = range(0, len(values) - k + 1, k)
    return statistics.fmean(rewards[start + choose(values[start : start + k])] for start in starts)


def answers(extract: Callable[[str], Any], completions: Sequence[str]) -> list[Hashable | None]:
    """The answer of each completion (`Task.extract`). Raises a UserError if it fails, or answers cannot be compared."""
    result: list[Hashable | None] = []
    for completion in completions:
        try:
            answer = extract(completion)
            hash(answer)
        except Exception as error:  # a task's own function
            raise UserError(
                f"extract: expected an answer that can be hashed, or None, got {type(error).__name__} ({error}) "
                f"for {completion!r}"
            ) from error
        result.append(answer)
    return result


def verdicts(accepts: Callable[[str], Any], completions: Sequence[str]) -> list[bool]:
    """Whether each completion accepts what it has read (`Task.accepts`). Raises a UserError if that is not said."""
    result = []
    for completion in completions:
        try:
            verdict = accepts(completion)
        except Exception as error:  # a task's own function
            raise UserError(
                f"accepts: expected True or False, got {type(error).__name__} ({error}) for {completion!r}"
            ) from error
        if not isinstance(verdict, bool):
            raise UserError(f"accepts: expected True or False, got {verdict!r} for {completion!r}")
        result.append(verdict)
    return result
