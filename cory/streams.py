"""Random numbers: each purpose has generators of its own, so that nothing else changes what they
draw.

No generator is reseeded, and none is shared: agents may draw at the same time, on any device. A run
needs no file for its random numbers, as those of an iteration derive from its number, so a resumed
run equals an unbroken one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class Purpose(IntEnum):
    """What random numbers are for. A number, once given, stays: the numbers of a run depend on it."""

    SHUFFLE = 1  # the order of rows in an update
    QUERIES = 2  # the order of queries in a pass over the data
    LENGTH = 4  # the maximum length of an iteration's responses
    SAMPLING = 5  # responses that agents learn from
    UNREAD = 6  # responses of observers that do not read, for counterfactual credit
    SAMPLES = 7  # responses to the fixed queries, before and after training
    HELD_OUT = 8  # responses to held-out queries while a run trains
    EVALUATION = 9  # responses of saved agents: evaluation and chat
    INITIALIZATION = 10  # value heads and adapters
    MODEL_CHECK = 11  # responses that check whether a model can be sampled


@dataclass(frozen=True)
class Stream:
    """The key of a stream of random numbers. Equal keys give equal numbers, whatever has been drawn
    before.

    What does not apply to a purpose is 0.

    Args:
        seed: of the run.
        purpose: what the numbers are for.
        iteration: from 0; of queries the pass over the data.
        agent, role, process: from 0.

    >>> first, second = (Stream(seed=0, purpose=Purpose.SHUFFLE, iteration=3).numpy() for _ in range(2))
    >>> first.permutation(8).tolist() == second.permutation(8).tolist()
    True
    """

    seed: int
    purpose: Purpose
    iteration: int = 0
    agent: int = 0
    role: int = 0
    process: int = 0

    def numpy(self) -> np.random.Generator:
        """A generator at the beginning of the stream."""
        return np.random.default_rng(astuple(self))

    def torch(self) -> torch.Generator:
        """A generator at the beginning of the stream, of numbers on the CPU."""
        import torch  # here, as importing it takes seconds, which not all who import this file have

        return torch.Generator().manual_seed(self._seed())

    @contextmanager
    def as_global(self) -> Iterator[None]:
        """In this context, torch's global generator of the CPU draws from the stream; afterwards it
        is as it was.

        For libraries that take no generator. Other threads must not draw from the global one
        meanwhile.
        """
        import torch

        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would reseed GPUs, too.
            torch.default_generator.manual_seed(self._seed())
            yield

    def _seed(self) -> int:
        return int(np.random.SeedSequence(astuple(self)).generate_state(1, np.uint64)[0])


def response_limit(seed: int, k: int, smallest: int, largest: int) -> int:
    """The limit of the responses of iteration `k` in tokens, drawn from [smallest, largest]."""
    # Of no process, so the same in all of them.
    return int(Stream(seed, Purpose.LENGTH, k).numpy().integers(smallest, largest + 1))
