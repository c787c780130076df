"""Computes exact gradients of small chains by enumerating every outcome of sampling, with its probability.

A chain's roles answer one query in turn. Role 1 reads the query; role j reads the query and role j - 1's response. A
response is one of a few tokens, a policy is a table of logits, and a reward is a table of values. The expectation of a
gradient estimate is its average over all outcomes. This average is compared with the objective's gradient, computed by
autograd. The order of independent draws does not matter, so outcomes that differ only in order are enumerated once
(`grouped`). All numbers are float64.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Stands for the earlier response if a role has not read one. As an index, it selects the table's last row.
NOTHING = -1


class Chain(NamedTuple):
    """Policies and rewards; queries are equally likely.

    policies: each role's logits, (queries, answers + 1, answers). Row i applies if the role has read answer i, the last
        row if it has read nothing; the first role has only the last row. A role that does not see the query has one
        table for all queries.
    rewards: each role's task rewards, (queries, answers).
    team: the team reward, (queries, answers of role 1, answers of role 2, ...), or None.
    """

    policies: tuple[Tensor, ...]
    rewards: tuple[Tensor, ...]
    team: Tensor | None = None

    @property
    def num_queries(self) -> int:
        return max(len(logits) for logits in self.policies)

    def probabilities(self, role: int, query: int, read: int) -> Tensor:
        """Returns the probabilities of a role's answers, (answers,)."""
        logits = self.policies[role]
        return logits[query % len(logits), read].softmax(-1)

    def objective_gradient(self) -> list[Tensor]:
        """Returns the gradient of the expected sum of all rewards (Eq. 4) with respect to each role's logits."""
        logits = [policy.clone().requires_grad_() for policy in self.policies]
        # All chains at once: the first dimension is the query, each further one a role's answer.
        sizes = [self.num_queries, *(policy.shape[-1] for policy in logits)]
        queries, *answers = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        chances = torch.full(sizes, 1 / self.num_queries, dtype=torch.float64)
        returns = torch.zeros(1) if self.team is None else self.team
        read: Tensor | int = NOTHING
        for policy, reward, given in zip(logits, self.rewards, answers, strict=True):
            chances = chances * policy.softmax(-1)[queries % len(policy), read, given]
            returns = returns + reward[queries, given]
            read = given
        gradients = torch.autograd.grad((chances * returns).sum(), logits)
        return [gradient.flatten() for gradient in gradients]


class Outcomes(NamedTuple):
    """Outcomes of sampling, in any order.

    chances: the outcomes' probabilities, (outcomes,).
    columns: tensors (outcomes, responses) by name and role. `query` and `read` are what a response's role has read,
        `answer` is what it answers; extra answers have other names (`Beside`). Responses to the same earlier response
        are adjacent.
    """

    chances: Tensor
    columns: Mapping[tuple[str, int], Tensor]

    def follow(self, values: Tensor, role: int) -> Tensor:
        """Repeats each value of an earlier role's responses, once for each response of `role` that follows."""
        return values.repeat_interleave(self.responses(role) // values.shape[1], dim=1)

    def responses(self, role: int) -> int:
        """Returns the number of a role's responses in one outcome."""
        return self.columns["answer", role].shape[1]

    def scaled(self, chance: float) -> "Outcomes":
        """Multiplies the outcomes' probabilities by `chance`, the probability of an earlier event."""
        return self._replace(chances=self.chances * chance)


def concatenated(parts: Sequence[Outcomes]) -> Outcomes:
    """Joins alternatives: exactly one of the parts happens."""
    chances = torch.cat([part.chances for part in parts])
    columns = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
    return Outcomes(chances, columns)


def crossed(first: Outcomes, second: Outcomes) -> Outcomes:
    """Combines independent outcomes: both happen. The second's responses come after the first's."""
    rows = torch.cartesian_prod(torch.arange(len(first.chances)), torch.arange(len(second.chances)))
    columns = {name: column[rows[:, 0]] for name, column in first.columns.items()}
    for name, column in second.columns.items():
        drawn = column[rows[:, 1]]
        columns[name] = torch.cat([columns[name], drawn], dim=1) if name in columns else drawn
    return Outcomes(first.chances[rows[:, 0]] * second.chances[rows[:, 1]], columns)


def grouped(outcomes: Outcomes, size: int) -> Outcomes:
    """Draws `size` times independently from the outcomes, regardless of order."""
    rows, orders = _multisets(len(outcomes.chances), size)
    chances = orders * outcomes.chances[rows].prod(1)
    return Outcomes(
        chances, {name: column[rows].flatten(1) for name, column in outcomes.columns.items()}
    )


@cache
def _multisets(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns all multisets of `size` out of `count` items, (multisets, size), and how many orders each has."""
    rows = torch.combinations(torch.arange(count), size, with_replacement=True)
    # The number of orders is size!, divided by k! for each set of k equal items, which are adjacent.
    orders = torch.ones(len(rows), dtype=torch.float64)
    equal_items = torch.ones(len(rows), dtype=torch.float64)
    for i in range(1, size):
        equal_items = torch.where(rows[:, i] == rows[:, i - 1], equal_items + 1, 1)
        orders = orders * (i + 1) / equal_items
    return rows, orders


# By role, an extra answer drawn for each response, such as a counterfactual one: its name, and its probabilities as a
# function of the query.
Beside = Mapping[int, tuple[str, Callable[[int], Tensor]]]


def draw(chances: Tensor, name: str, role: int) -> Outcomes:
    """Draws one answer with these probabilities."""
    return Outcomes(chances, {(name, role): torch.arange(len(chances))[:, None]})


def response(chain: Chain, role: int, query: int, read: int) -> Outcomes:
    """Draws one response of a role."""
    outcomes = draw(chain.probabilities(role, query, read), "answer", role)
    answers = outcomes.columns["answer", role]
    prompt = {"query": query, "read": read}
    columns = {(name, role): torch.full_like(answers, value) for name, value in prompt.items()}
    return outcomes._replace(columns={**outcomes.columns, **columns})


def subtrees(
    chain: Chain,
    fanouts: Sequence[int],
    query: int,
    beside: Beside | None = None,
    role: int = 0,
    read: int = NOTHING,
) -> Outcomes:
    """Draws one response of a role, and all later roles' responses that follow it.

    Args:
        chain: the chain.
        fanouts: for each role, its number of responses to each response of the previous role.
        query: the query.
        beside: extra answers.
        role: the role of the first response.
        read: the answer that it has read.
    """
    beside = beside or {}
    outcomes = response(chain, role, query, read)
    if role + 1 < len(chain.policies):
        parts = []
        for answer in range(len(outcomes.chances)):
            this_answer = Outcomes(
                outcomes.chances[[answer]],
                {name: column[[answer]] for name, column in outcomes.columns.items()},
            )
            below = subtrees(chain, fanouts, query, beside, role + 1, answer)
            parts.append(crossed(this_answer, grouped(below, fanouts[role + 1])))
        outcomes = concatenated(parts)
    if role in beside:
        name, probabilities = beside[role]
        outcomes = crossed(outcomes, draw(probabilities(query), name, role))
    return outcomes


def groups(chain: Chain, fanouts: Sequence[int], beside: Beside | None = None) -> list[Outcomes]:
    """Draws a query and `fanouts[0]` trees of responses to it (`subtrees`). Returns a part per query."""
    trees = [subtrees(chain, fanouts, query, beside) for query in range(chain.num_queries)]
    return [grouped(tree, fanouts[0]).scaled(1 / chain.num_queries) for tree in trees]


def task_rewards(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """Returns each role's task rewards, (outcomes, responses)."""
    return [
        reward[outcomes.columns["query", role], outcomes.columns["answer", role]]
        for role, reward in enumerate(chain.rewards)
    ]


def team_rewards(chain: Chain, outcomes: Outcomes) -> Tensor | None:
    """Returns the team reward of each of the last role's responses, (outcomes, responses), or None."""
    if chain.team is None:
        return None
    last = len(chain.policies) - 1
    # With AT-GRPO, the next role reads only one of several responses, so take the answer that it has read.
    answers = [outcomes.columns["read", role] for role in range(1, last + 1)]
    answers = [outcomes.follow(column, last) for column in answers]
    return chain.team[(outcomes.columns["query", last], *answers, outcomes.columns["answer", last])]


class Estimate(NamedTuple):
    """Moments of a gradient estimate over all outcomes, by role.

    means: the mean, (parameters,).
    variances: the variance, summed over parameters.
    within: the variance within parts, such as queries, summed over parameters.
    """

    means: list[Tensor]
    variances: list[float]
    within: list[float]


def moments(
    chain: Chain, parts: Sequence[Outcomes], advantages: Callable[[Outcomes], Sequence[Tensor]]
) -> Estimate:
    """Returns the moments of a policy-gradient estimate: the gradient of a learner's first optimizer step.

    For each role, the estimate averages log-probability gradient times advantage over the role's responses.

    Args:
        chain: the chain.
        parts: outcomes by part, such as by query; together, all outcomes.
        advantages: computes each role's advantages, (outcomes, responses), from outcomes.
    """
    means = [torch.zeros(logits.numel(), dtype=torch.float64) for logits in chain.policies]
    squares, within = [0.0] * len(means), [0.0] * len(means)
    for outcomes in parts:
        for role, role_advantages in enumerate(advantages(outcomes)):
            samples = _gradients(chain, outcomes, role, role_advantages)
            mean = outcomes.chances @ samples
            square = (outcomes.chances @ samples.square()).sum().item()
            means[role] += mean
            squares[role] += square
            within[role] += square - (mean.square().sum() / outcomes.chances.sum()).item()
    variances = [
        square - mean.square().sum().item() for square, mean in zip(squares, means, strict=True)
    ]
    return Estimate(means, variances, within)


def _gradients(chain: Chain, outcomes: Outcomes, role: int, advantages: Tensor) -> Tensor:
    """Averages log-probability gradient times advantage over a role's responses, (outcomes, parameters)."""
    logits, answers = chain.policies[role], outcomes.columns["answer", role]
    queries = outcomes.columns["query", role] % len(logits)
    table_rows = queries * logits.shape[1] + outcomes.columns["read", role] % logits.shape[1]
    # The gradient of a log-softmax is the chosen answer's one-hot vector minus the probabilities.
    sums = torch.zeros(len(answers), logits.numel(), dtype=torch.float64)
    sums.scatter_add_(1, table_rows * logits.shape[2] + answers, advantages / answers.shape[1])
    sums = sums.view(len(answers), -1, logits.shape[2])
    probabilities = logits.softmax(-1).flatten(0, 1)
    return (sums - sums.sum(2, keepdim=True) * probabilities).flatten(1)
