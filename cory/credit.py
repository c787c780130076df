"""Credit: the training reward of each role, from the task rewards of the whole chain (Eq. 4 and alternatives to it).

A chain samples a_1 ~ pi_1(.|q), a_2 ~ pi_2(.|q, a_1), ...; r_j = r(q, a_j). docs/learners.md derives each mode.
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
    """The training reward of each role: a tensor for each, in the order of the chain, with an entry per response.

    Roles have equally many responses, but for branches: then the second has `branches` for each of the first, one after
    the other. What the first gets of the second's rewards is the mean over these.

    Args:
        task_rewards: of each role, in the order of the chain, the task rewards r_j of its responses.
        mode: `collective`: `r_i + weight * sum_{j != i} r_j`, Eq. 4. `mean`: the same over the number of roles.
            `causal`: `r_i + weight * sum_{j > i} r_j`, what role i can still influence. `own`: `r_i`.
            `counterfactual`: `r_i + weight * sum_{j > i} (r_j - b_j)`. `information`: `r_1 + weight * I` and `r_2`.
        weight: of the other roles' rewards: 1 cooperative (Eq. 4), 0 independent, negative competitive.
        baselines: of each role after the first, for `counterfactual`, the task rewards b_j of its agent when it has not
            read the earlier responses: its own template, with empty responses in their place.
        team_rewards: R of each chain, as many as the last role has responses. Every role gets its chains' R, whatever
            the mode: it is not shared out.
        information: of the second role, for `information`, what the first response tells about each row's answer, I.

    Raises a UserError if there is no such mode, and a ValueError if baselines or information are missing.

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
            f"counterfactual: expected the rewards of {len(task_rewards) - 1} roles that did not read, "
            f"got {len(baselines)}"
        )
    if mode == "information" and len(information) != len(task_rewards) - 1:
        raise ValueError(
            f"information: expected that of {len(task_rewards) - 1} roles, got {len(information)}"
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
    """What a role gets of the chain's task rewards."""
    own = task_rewards[role]
    earlier, later = task_rewards[:role], task_rewards[role + 1 :]

    def weighted(rewards: Sequence[Tensor]) -> Tensor | float:
        return weight * sum(per_response(reward, like=own) for reward in rewards)

    match mode:
        case "collective":
            return own + weighted([*earlier, *later])  # Eq. 4
        case "mean":
            return (own + weighted([*earlier, *later])) / len(task_rewards)
        case "causal":
            return own + weighted(later)
        case "own":
            return own
        case "counterfactual":
            gained = [r - b for r, b in zip(later, baselines[role:], strict=True)]
            return own + weighted(gained)
        case "information":
            return own + weighted(information[role:])
        case _:
            modes = ", ".join(get_args(CreditMode))
            raise UserError(f"cory.credit: expected one of {modes}, got {mode!r}")


def per_response(values: Tensor, like: Tensor) -> Tensor:
    """One role's values per response of another role, `like`: the mean over its branches, or the value of its stem."""
    if len(values) > len(like):
        return values.view(len(like), -1).mean(1)
    return values.repeat_interleave(len(like) // len(values))
