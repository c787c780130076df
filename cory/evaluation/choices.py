"""Choosing among several responses to a query: what a chain's rivals at equal calls earn."""

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


def reward_at_k(
    choose: Callable[[Sequence[V]], int], values: Sequence[V], rewards: Sequence[float], k: int
) -> float:
    """Mean reward of the response that is chosen among k, over the groups of k responses, one after the other.

    Responses that do not fill a last group are left out.

    Args:
        choose: from the values of a group to the index of one of them: `majority`.
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
