"""Credit assignment: computes each role's training rewards from the task rewards of all roles (Eq. 4 or alternatives).

A role is a position in the chain of agents. The first one answers a query q with a_1 ~ pi_1(.|q), the second one reads
that answer and gives a_2 ~ pi_2(.|q, a_1), and so on. Role j's task reward is r_j = r(q, a_j). docs/learners.md derives
each mode.
"""

from collections.abc import Sequence
from typing import get_args

from torch import Tensor

from cory.config import CreditMode
from cory.errors import UserError


def assign_credit(
    task_rewards: Sequence[Tensor],
    mode: str = "collective",
    weight: float = 1.0,
    baselines: Sequence[Tensor] = (),
    team_rewards: Tensor | None = None,
    information: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Returns each role's training rewards: one tensor per role, in chain order, with one entry per response.

    All roles have the same number of responses, except with `Config.branches`. Then the second role has several
    responses, adjacent in the batch, to each response of the first role. The first role's response is credited with
    their mean reward.

    Args:
        task_rewards: each role's task rewards r_j, one tensor per role, in chain order.
        mode: `collective`: `r_i + weight * sum_{j != i} r_j` (Eq. 4). `mean`: the same, divided by the number of roles.
            `causal`: `r_i + weight * sum_{j > i} r_j`, only rewards that role i can influence. `own`: `r_i`.
            `counterfactual`: `r_i + weight * sum_{j > i} (r_j - b_j)`. `information`: `r_1 + weight * I` and `r_2`.
        weight: weight of the other roles' rewards: 1 is cooperative (Eq. 4), 0 independent, negative competitive.
        baselines: for `counterfactual`, one tensor b_j per later role: its task rewards when its prompts hold empty
            texts in place of the earlier responses.
        team_rewards: rewards R of whole chains, one per response of the last role. Every role receives R in full,
            whatever the mode.
        information: for `information`, a list of one tensor I, with one entry per response of the second role: how much
            the first role's response raises the right answer's log-likelihood.

    Raises a UserError if the mode is unknown, and a ValueError if baselines or information are missing.

    >>> from torch import tensor
    >>> assign_credit([tensor([1.0]), tensor([10.0])])
    [tensor([11.]), tensor([11.])]
    >>> assign_credit([tensor([1.0]), tensor([10.0])], "mean")
    [tensor([5.5000]), tensor([5.5000])]
    >>> assign_credit([tensor([1.0]), tensor([10.0])], "causal")
    [tensor([11.]), tensor([10.])]
    >>> assign_credit([tensor([1.0]), tensor([10.0, 20.0])], "causal", team_rewards=tensor([0.0, 100.0]))
    [tensor([66.]), tensor([ 10., 120.])]
    """
    if mode == "counterfactual" and len(baselines) != len(task_rewards) - 1:
        raise ValueError(
            f"counterfactual: expected baselines for {len(task_rewards) - 1} later roles, "
            f"got {len(baselines)}"
        )
    if mode == "information" and len(information) != len(task_rewards) - 1:
        raise ValueError(
            f"information: expected one tensor for each of {len(task_rewards) - 1} later roles, "
            f"got {len(information)}"
        )
    rewards = [
        _share(role, task_rewards, mode, weight, baselines, information)
        for role in range(len(task_rewards))
    ]
    if team_rewards is None:
        return rewards
    return [reward + per_response(team_rewards, like=reward) for reward in rewards]


def _share(
    role: int,
    task_rewards: Sequence[Tensor],
    mode: str,
    weight: float,
    baselines: Sequence[Tensor],
    information: Sequence[Tensor],
) -> Tensor:
    """Returns one role's training rewards, without the team reward."""
    role_rewards = task_rewards[role]
    earlier, later = task_rewards[:role], task_rewards[role + 1 :]

    def weighted(rewards: Sequence[Tensor]) -> Tensor | float:
        return weight * sum(per_response(reward, like=role_rewards) for reward in rewards)

    match mode:
        case "collective":
            return role_rewards + weighted([*earlier, *later])  # Eq. 4
        case "mean":
            return (role_rewards + weighted([*earlier, *later])) / len(task_rewards)
        case "causal":
            return role_rewards + weighted(later)
        case "own":
            return role_rewards
        case "counterfactual":
            gained = [r - b for r, b in zip(later, baselines[role:], strict=True)]
            return role_rewards + weighted(gained)
        case "information":
            return role_rewards + weighted(information[role:])
        case _:
            modes = ", ".join(get_args(CreditMode))
            raise UserError(f"cory.credit: expected one of {modes}, got {mode!r}")


def per_response(values: Tensor, like: Tensor) -> Tensor:
    """Converts one role's values to one entry per response of another role.

    If `values` has more entries than `like`, adjacent entries are averaged; if it has fewer, each entry is repeated.

    Args:
        values: one entry per response of the role that they belong to.
        like: any values with one entry per response of the other role.
    """
    if len(values) > len(like):
        return values.view(len(like), -1).mean(1)
    return values.repeat_interleave(len(like) // len(values))
