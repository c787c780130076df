"""Gradients of small chains, exactly: every outcome of sampling tabular policies, with its probability.

A response is one token out of a few, a policy a table of logits, a reward a table. Role 1 reads the query, role j the
query and the response of role j - 1. Estimates of the policy gradient are averaged over all outcomes, and compared with
the objective's own gradient, by autograd. Samples that are drawn alike may come in any order, so outcomes that differ
in the order alone are enumerated once (`grouped`). All numbers are float64.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

NOTHING = (
    -1
)  # what a role reads that has not read the response before it: the last row of its table


class Chain(NamedTuple):
    """Policies and rewards; queries are equally likely.

    policies: logits of each role, (queries, answers + 1, answers): row i for what it reads, an answer i, the last row
        for nothing. The first role's have that row alone. A role that does not see the query has one table for all.
    rewards: task rewards of each role, (queries, answers).
    team: the team reward, (queries, answers of role 1, answers of role 2, ...), if there is one.
    """

    policies: tuple[Tensor, ...]
    rewards: tuple[Tensor, ...]
    team: Tensor | None = None

    @property
    def num_queries(self) -> int:
        return max(len(logits) for logits in self.policies)

    def probabilities(self, role: int, query: int, read: int) -> Tensor:
        """Returns how likely each of a role's answers is, (answers,)."""
        logits = self.policies[role]
        return logits[query % len(logits), read].softmax(-1)

    def objective_gradient(self) -> list[Tensor]:
        """The gradient of the expected sum of all rewards (Eq. 4) with respect to each role's logits, by autograd."""
        logits = [policy.clone().requires_grad_() for policy in self.policies]
        # Queries and each role's answers have a dimension of their own: every chain at once.
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

    chances: their probabilities, (outcomes,).
    columns: by name and role, (outcomes, responses) each: `answer`, `query` and `read` of the role's responses, and
        what is drawn beside them. Responses that follow the same one stand together.
    """

    chances: Tensor
    columns: Mapping[tuple[str, int], Tensor]

    def follow(self, values: Tensor, role: int) -> Tensor:
        """The values of earlier responses, for each response of a role that follows them."""
        return values.repeat_interleave(self.responses(role) // values.shape[1], dim=1)

    def responses(self, role: int) -> int:
        """How many a role gives in an outcome."""
        return self.columns["answer", role].shape[1]

    def scaled(self, chance: float) -> "Outcomes":
        """The same outcomes, after something else of that probability."""
        return self._replace(chances=self.chances * chance)


def concatenated(parts: Sequence[Outcomes]) -> Outcomes:
    """One of the parts happens."""
    chances = torch.cat([part.chances for part in parts])
    columns = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
    return Outcomes(chances, columns)


def crossed(first: Outcomes, second: Outcomes) -> Outcomes:
    """Both happen, independently; the second's responses stand after the first's."""
    rows = torch.cartesian_prod(torch.arange(len(first.chances)), torch.arange(len(second.chances)))
    columns = {name: column[rows[:, 0]] for name, column in first.columns.items()}
    for name, column in second.columns.items():
        drawn = column[rows[:, 1]]
        columns[name] = torch.cat([columns[name], drawn], dim=1) if name in columns else drawn
    return Outcomes(first.chances[rows[:, 0]] * second.chances[rows[:, 1]], columns)


def grouped(outcomes: Outcomes, size: int) -> Outcomes:
    """`size` independent draws of the outcomes, without regard to their order."""
    rows, orders = _multisets(len(outcomes.chances), size)
    chances = orders * outcomes.chances[rows].prod(1)
    return Outcomes(
        chances, {name: column[rows].flatten(1) for name, column in outcomes.columns.items()}
    )


@cache
def _multisets(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Every choice of `size` out of `count`, with repetition, (choices, size), and in how many orders it comes."""
    rows = torch.combinations(torch.arange(count), size, with_replacement=True)
    # Rows are sorted: of k equal ones the i-th divides the number of orders, size!, by i.
    orders = torch.ones(len(rows), dtype=torch.float64)
    run = torch.ones(len(rows), dtype=torch.float64)
    for i in range(1, size):
        run = torch.where(rows[:, i] == rows[:, i - 1], run + 1, 1)
        orders = orders * (i + 1) / run
    return rows, orders


# By role, what is drawn beside each of its responses: a name, and the probabilities, from the query.
Beside = Mapping[int, tuple[str, Callable[[int], Tensor]]]


def draw(chances: Tensor, name: str, role: int) -> Outcomes:
    """One answer with these probabilities."""
    return Outcomes(chances, {(name, role): torch.arange(len(chances))[:, None]})


def response(chain: Chain, role: int, query: int, read: int) -> Outcomes:
    """One response of a role."""
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
    """One response of a role, and all that follow it.

    Args:
        fanouts: of each role, how many responses it gives to each of the role before.
    """
    beside = beside or {}
    outcomes = response(chain, role, query, read)
    if role + 1 < len(chain.policies):
        parts = []
        for answer in range(len(outcomes.chances)):
            of_answer = Outcomes(
                outcomes.chances[[answer]],
                {name: column[[answer]] for name, column in outcomes.columns.items()},
            )
            below = subtrees(chain, fanouts, query, beside, role + 1, answer)
            parts.append(crossed(of_answer, grouped(below, fanouts[role + 1])))
        outcomes = concatenated(parts)
    if role in beside:
        name, probabilities = beside[role]
        outcomes = crossed(outcomes, draw(probabilities(query), name, role))
    return outcomes


def groups(chain: Chain, fanouts: Sequence[int], beside: Beside | None = None) -> list[Outcomes]:
    """A query, `fanouts[0]` responses of the first role to it, and all that follow them; a part for each query."""
    stems = [subtrees(chain, fanouts, query, beside) for query in range(chain.num_queries)]
    return [grouped(stem, fanouts[0]).scaled(1 / chain.num_queries) for stem in stems]


def task_rewards(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """Returns the task rewards of each role's responses, (outcomes, responses)."""
    return [
        reward[outcomes.columns["query", role], outcomes.columns["answer", role]]
        for role, reward in enumerate(chain.rewards)
    ]


def team_rewards(chain: Chain, outcomes: Outcomes) -> Tensor | None:
    """Returns the team reward of each response of the last role, (outcomes, responses)."""
    if chain.team is None:
        return None
    last = len(chain.policies) - 1
    # An answer is what the next role has read, which need not be its stem's (AT-GRPO).
    answers = [outcomes.columns["read", role] for role in range(1, last + 1)]
    answers = [outcomes.follow(column, last) for column in answers]
    return chain.team[(outcomes.columns["query", last], *answers, outcomes.columns["answer", last])]


class Estimate(NamedTuple):
    """An estimate of the gradient over all outcomes, by role: its mean, (parameters,), its variance, summed over the
    parameters, and the variance within parts, such as queries.
    """

    means: list[Tensor]
    variances: list[float]
    within: list[float]


def moments(
    chain: Chain, parts: Sequence[Outcomes], advantages: Callable[[Outcomes], Sequence[Tensor]]
) -> Estimate:
    """Returns the moments of the mean over a role's responses of log-gradient times advantage, a learner's first step.

    Args:
        parts: together, all outcomes.
        advantages: from outcomes, those of each role's responses, (outcomes, responses).
    """
    means = [torch.zeros(logits.numel(), dtype=torch.float64) for logits in chain.policies]
    squares, within = [0.0] * len(means), [0.0] * len(means)
    for outcomes in parts:
        for role, of_role in enumerate(advantages(outcomes)):
            samples = _gradients(chain, outcomes, role, of_role)
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
    """The mean over a role's responses of log-gradient times advantage, (outcomes, parameters)."""
    logits, answers = chain.policies[role], outcomes.columns["answer", role]
    queries = outcomes.columns["query", role] % len(logits)
    table_rows = queries * logits.shape[1] + outcomes.columns["read", role] % logits.shape[1]
    # The gradient of a softmax's log-probability: the chosen answer's indicator minus the probabilities.
    sums = torch.zeros(len(answers), logits.numel(), dtype=torch.float64)
    sums.scatter_add_(1, table_rows * logits.shape[2] + answers, advantages / answers.shape[1])
    sums = sums.view(len(answers), -1, logits.shape[2])
    probabilities = logits.softmax(-1).flatten(0, 1)
    return (sums - sums.sum(2, keepdim=True) * probabilities).flatten(1)
