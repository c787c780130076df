"""Random numbers: each purpose has its own generators, so that draws do not depend on each other.

Generators are never shared or reseeded, so agents may draw at the same time, on any device. Each iteration's
generators derive from its number. Checkpoints therefore need no random state, and a resumed run equals an unbroken one.
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
    """Purposes of random numbers. Values must not change: a run's random numbers depend on them."""

    SHUFFLE = 1  # the order of rows in an update
    QUERIES = 2  # the order of queries in a pass over the data
    LENGTH = 4  # the length limit of an iteration's responses
    SAMPLING = 5  # responses that agents learn from
    UNREAD = 6  # responses to prompts with earlier responses blanked out, for counterfactual credit
    SAMPLES = 7  # responses to the fixed queries, before and after training
    HELD_OUT = 8  # responses to held-out queries during training
    EVALUATION = 9  # responses of saved agents, in evaluation and chat
    INITIALIZATION = 10  # value heads and adapters
    MODEL_CHECK = 11  # responses that check whether a model can be sampled


@dataclass(frozen=True)
class Stream:
    """The key of a stream of random numbers. Equal keys give equal numbers, regardless of earlier draws.

    Fields that do not apply to a purpose are 0.

    Args:
        seed: the run's seed.
        purpose: what the numbers are used for.
        iteration: iteration, from 0; for `Purpose.QUERIES`, the number of the pass over the data.
        agent, role, process: indices, from 0.

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
        """Returns a numpy generator at the beginning of the stream."""
        return np.random.default_rng(astuple(self))

    def torch(self) -> torch.Generator:
        """Returns a torch generator on the CPU, at the beginning of the stream."""
        import torch  # slow to import, and not always needed

        return torch.Generator().manual_seed(self._seed())

    @contextmanager
    def as_global(self) -> Iterator[None]:
        """Makes torch's global CPU generator draw from the stream within the context, and restores it afterwards.

        This is for libraries that accept no generator. Meanwhile, no other thread may draw from the global generator.
        """
        import torch

        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would also reseed GPUs.
            torch.default_generator.manual_seed(self._seed())
            yield

    def _seed(self) -> int:
        return int(np.random.SeedSequence(astuple(self)).generate_state(1, np.uint64)[0])


def response_limit(seed: int, k: int, smallest: int, largest: int) -> int:
    """Draws the length limit of iteration `k`'s responses, in tokens, from [smallest, largest]."""
    # The key has no rank, so all ranks draw the same limit.
    return int(Stream(seed, Purpose.LENGTH, k).numpy().integers(smallest, largest + 1))
