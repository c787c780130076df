"""Credit: the training reward of each role, from the task rewards of the whole chain (Eq. 4 and alternatives to it).

A chain samples a_1 ~ pi_1(.|q), a_2 ~ pi_2(.|q, a_1), ...; r_j = r(q, a_j). docs/credit.md derives each mode.
"""

import torch

from cory.errors import one_of

MODES = ("collective", "causal", "own", "counterfactual")


def assign_credit(
    task_rewards: torch.Tensor, mode: str = "collective", weight: float = 1.0, unread: torch.Tensor | None = None
) -> torch.Tensor:
    """The training reward of each role; all tensors are (roles, batch), roles in the order of the chain.

    Args:
        task_rewards: r_j of each role's response.
        mode: `collective`: `r_i + weight * sum_{j != i} r_j`, Eq. 4. `causal`: `r_i + weight * sum_{j > i} r_j`, what
            role i can still influence. `own`: `r_i`. `counterfactual`: `r_i + weight * sum_{j > i} (r_j - b_j)`.
        weight: of the other roles' rewards: 1 cooperative (Eq. 4), 0 independent, negative competitive.
        unread: b_j for `counterfactual`: the task reward of role j's agent when it has not read the preceding
            response. The first row, the pioneer's, is not used.

    Raises a UserError if there is no such mode.

    >>> rewards = torch.tensor([[1.0], [10.0]])
    >>> assign_credit(rewards).tolist(), assign_credit(rewards, "causal").tolist()
    ([[11.0], [11.0]], [[11.0], [10.0]])
    """
    one_of("cory.credit", MODES, mode)
    if mode == "own":
        return task_rewards
    if mode == "collective":
        return (1 - weight) * task_rewards + weight * task_rewards.sum(0, keepdim=True)
    gain = task_rewards
    if mode == "counterfactual" and len(task_rewards) > 1:
        if unread is None:
            raise ValueError("counterfactual: expected the rewards of roles that did not read, got None")
        gain = task_rewards - unread
    later = gain.flip(0).cumsum(0).flip(0) - gain  # sums over j > i
    return task_rewards + weight * later
