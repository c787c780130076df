"""The algorithms by which an agent learns, and in what those without values differ. Formulas: docs/learners.md.

Importing this does not import torch.
"""

from dataclasses import dataclass
from typing import Literal

AlgorithmName = Literal["ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce"]


@dataclass(frozen=True, kw_only=True)
class GroupAlgorithm:
    """How an agent learns from the rewards of a group of responses, without values.

    Args:
        baseline: what is subtracted from a reward: the mean of its `group`; of the `others` in it;
            or of the role's `batch`, so that one response to a query is enough.
        divides_by_std: whether advantages are divided by the group's standard deviation.
        loss_over: a `response` as a whole, with one probability ratio; or its tokens, each with its
            own: their mean over the response (`tokens`), their sum over `sampling.max_new_tokens`
            (`limit`), or the mean over the tokens of the `batch`.
        kl_in: where the KL to the reference acts, in a response's reward or as a term of each token's loss.
        needs_end: whether a response that was cut at its limit is left out of the loss.
    """

    baseline: Literal["group", "others", "batch"]
    divides_by_std: bool = False
    loss_over: Literal["response", "tokens", "limit", "batch"]
    kl_in: Literal["reward", "loss"]
    needs_end: bool = False


GROUP_ALGORITHMS = {
    "grpo": GroupAlgorithm(
        baseline="group", divides_by_std=True, loss_over="tokens", kl_in="loss"
    ),  # Shao et al., 2024
    "dr_grpo": GroupAlgorithm(
        baseline="group", loss_over="limit", kl_in="loss"
    ),  # Liu et al., 2025
    "dapo": GroupAlgorithm(
        baseline="group", divides_by_std=True, loss_over="batch", kl_in="loss", needs_end=True
    ),  # Yu et al., 2025
    "rloo": GroupAlgorithm(
        baseline="others", loss_over="response", kl_in="reward"
    ),  # Ahmadian et al., 2024
    "reinforce": GroupAlgorithm(baseline="batch", loss_over="response", kl_in="reward"),
}


def compares_responses(algorithm: AlgorithmName) -> bool:
    """Whether an algorithm compares the responses to one query, so that it needs several."""
    return algorithm in GROUP_ALGORITHMS and GROUP_ALGORITHMS[algorithm].baseline != "batch"
