"""Random numbers from generators that are made for a purpose, so that nothing else changes what they draw."""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What random numbers are for. A number, once given, stays: the numbers of a run depend on it."""

    SHUFFLE = 1  # the order of rows in an update


def generator(seed: int, iteration: int, purpose: Purpose, agent: int, process: int) -> np.random.Generator:
    """The generator of a purpose; the same arguments give the same numbers, whatever has been drawn before.

    Args:
        seed: of the run.
        iteration, agent, process: from 0.

    >>> first, second = (generator(0, 3, Purpose.SHUFFLE, agent, 0) for agent in (0, 0))
    >>> first.permutation(8).tolist() == second.permutation(8).tolist()
    True
    """
    return np.random.default_rng([seed, iteration, purpose, agent, process])
