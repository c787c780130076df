"""Credit: the training reward of each role, from the task rewards of the whole chain (Eq. 4 and alternatives to it).

A chain samples a_1 ~ pi_1(.|q), a_2 ~ pi_2(.|q, a_1), ...; r_j = r(q, a_j). docs/credit.md derives each mode.
"""

from collections.abc import Sequence

from torch import Tensor

from cory.errors import one_of

MODES = ("collective", "causal", "own", "counterfactual")


def assign_credit(
    task_rewards: Sequence[Tensor],
    mode: str = "collective",
    weight: float = 1.0,
    unread: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The training reward of each role: a (batch,) tensor for each, in the order of the chain.

    Args:
        task_rewards: of each role, in the order of the chain, the (batch,) task rewards r_j of its responses.
        mode: `collective`: `r_i + weight * sum_{j != i} r_j`, Eq. 4. `causal`: `r_i + weight * sum_{j > i} r_j`, what
            role i can still influence. `own`: `r_i`. `counterfactual`: `r_i + weight * sum_{j > i} (r_j - b_j)`.
        weight: of the other roles' rewards: 1 cooperative (Eq. 4), 0 independent, negative competitive.
        unread: of each role, for `counterfactual`, the (batch,) task rewards b_j of its agent when it has not read the
            preceding response. The first, the pioneer's, is not used.

    Raises a UserError if there is no such mode.

    >>> from torch import tensor
    >>> assign_credit([tensor([1.0]), tensor([10.0])])
    [tensor([11.]), tensor([11.])]
    >>> assign_credit([tensor([1.0]), tensor([10.0])], "causal")
    [tensor([11.]), tensor([10.])]
    """
    one_of("cory.credit", MODES, mode)
    if mode == "own":
        return list(task_rewards)
    if mode == "collective":
        total = sum(task_rewards)
        return [(1 - weight) * reward + weight * total for reward in task_rewards]  # Eq. 4

    # `causal`: what later roles earn. `counterfactual`: what they earn because they have read.
    gains = list(task_rewards)
    if mode == "counterfactual" and len(task_rewards) > 1:
        if unread is None:
            raise ValueError("counterfactual: expected the rewards of roles that did not read, got None")
        gains = [reward - baseline for reward, baseline in zip(task_rewards, unread, strict=True)]
    return [reward + weight * sum(gains[role + 1 :]) for role, reward in enumerate(task_rewards)]
