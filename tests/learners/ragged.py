"""Queries and responses of different lengths for a learner's update."""

import torch

from cory.rollout import Rollout


def ragged(rows: int = 8, seed: int = 0):
    """Draws queries and responses of different lengths, and scores."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return torch.randint(
            2, 300, (int(torch.randint(low, high, (1,), generator=generator)),), generator=generator
        )

    queries, responses = [draw(2, 9) for _ in range(rows)], [draw(2, 12) for _ in range(rows)]
    return queries, responses, torch.randn(rows, generator=generator)


def rollout_of(queries, responses, finished=None):
    """Returns a rollout with these token ids and empty texts. By default, no response was cut off."""
    texts = [""] * len(queries)
    return Rollout(texts, texts, queries, responses, finished=finished or [True] * len(queries))


def weights(trainer):
    """Returns all weights of a learner or a TRL trainer as one vector."""
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
