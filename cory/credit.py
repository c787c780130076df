"""Credit: the training reward of each role, from the task rewards of the whole chain (Eq. 4 and alternatives to it).

A chain samples a_1 ~ pi_1(.|q), a_2 ~ pi_2(.|q, a_1), ...; r_j = r(q, a_j). docs/learners.md derives each mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from torch import Tensor

from cory.config import CreditMode
from cory.errors import UserError
from cory.models.text import special_tokens
from cory.rewards import score_rollouts
from cory.streams import Purpose

if TYPE_CHECKING:
    from cory.agent import Agent
    from cory.iteration import Batch
    from cory.models.rollout import Rollout
    from cory.trainer import CoryTrainer

LEAST_LOG_LIKELIHOOD = -10.0  # nats, of an answer; a smaller one counts as this


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


def rewards_without_reading(
    trainer: CoryTrainer, k: int, chain: Sequence[Agent], batch: Batch
) -> list[Tensor]:
    """For counterfactual credit, each later role's (batch,) task rewards when it reads empty responses. Else none."""
    if trainer.config.cory.credit != "counterfactual" or len(chain) == 1:
        return []
    generators = trainer.generators(Purpose.UNREAD, chain, k)
    rollouts = []
    for role in range(1, len(chain)):
        empty = [""] * len(batch.columns_of(role)["prompt"])
        rollouts.append(trainer.respond(chain[role], role, batch, [empty] * role, generators[role]))
    scores = score_rollouts(trainer.task, batch, rollouts, first=1)
    return [score.total for score in scores]


def information_in_responses(
    trainer: CoryTrainer, chain: Sequence[Agent], batch: Batch, rollouts: Sequence[Rollout]
) -> list[Tensor]:
    """For information credit, by how many nats the answer is likelier after what the second role reads than after the
    same with the response to another query: (batch,) of the second role. Else none.

    Answers are those of the dataset's column `answer`; likelihoods are the second role's agent's, before its update,
    and at least `LEAST_LOG_LIKELIHOOD`.
    """
    if trainer.config.cory.credit != "information" or len(chain) == 1:
        return []
    first, second = rollouts
    reader = chain[1]
    columns = batch.columns_of(1)

    # The same prompts with the first response of a chain that answers another query.
    chains = trainer.config.chains_per_query
    moved = [*first.completions[-chains:], *first.completions[:-chains]]
    prompts = trainer.task.prompts_of_role(
        1,
        columns,
        batch.earlier_responses(1, [replace(first, completions=moved)]),
        reader.encode,
        special_tokens(reader.tokenizer),
        reader.context_length,
        trainer.max_new_tokens(1, batch),
    )

    answers = columns["answer"]
    likelihoods = reader.log_likelihoods([*second.prompts, *prompts], [*answers, *answers])
    after_own, after_other = likelihoods.clamp(min=LEAST_LOG_LIKELIHOOD).chunk(2)
    return [after_own - after_other]


def per_response(values: Tensor, like: Tensor) -> Tensor:
    """One role's values per response of another role, `like`: the mean over its branches, or the value of its stem."""
    if len(values) > len(like):
        return values.view(len(like), -1).mean(1)
    return values.repeat_interleave(len(like) // len(values))
