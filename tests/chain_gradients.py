"""The gradient of a chain's policies on a two-step toy, enumerated exactly: its mean and its variance.

A pioneer draws one of a few answers, an observer that has read it draws one, and rewards are tables. `dependence` is
how much the observer's policy heeds what it has read: with 0 it does not read at all. The objective is Eq. 4's,
E[r1 + r2]. The mean gradient is compared with the objective's own, by autograd; variances are sums over all parameters.

`of_mode` is about modes of credit, each with one chain and no baseline. `of_batch` is about branches: batches of
several chains with the baselines of `algorithm: reinforce`, on queries that are drawn, and of `rloo`, on one query.
`of_questions` is about branches with rows of their own: questions, of which the pioneer sees none.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cory.credit import assign_credit
from cory.learners.algorithms import group_advantages

ANSWERS = 4  # to a step, for the modes
BATCH_ANSWERS = 3  # and for whole batches, which have more outcomes


class World(NamedTuple):
    """Policies and rewards for queries that are equally likely.

    pioneer: logits (queries, answers). observer: logits (queries, answers + 1, answers): row i is for a pioneer that
    answered i, the last for one that it has not read. r1, r2: rewards (queries, answers). Where the observer is asked
    several questions about one query of the pioneer, `pioneer` and `r1` have one row, the others one for each question.
    """

    pioneer: Tensor
    observer: Tensor
    r1: Tensor
    r2: Tensor

    def log_gradients(self) -> tuple[Tensor, Tensor]:
        """The gradients of log pi_1 and log pi_2, (queries, answers, parameters) and (queries, answers + 1, answers,
        parameters).

        With respect to logits, those of a softmax are the chosen answer's indicator minus the probabilities.
        """
        queries, rows, answers = self.observer.shape
        sizes = self.pioneer.numel(), self.observer.numel()
        first = torch.zeros(len(self.pioneer), answers, sum(sizes), dtype=torch.float64)
        second = torch.zeros(queries, rows, answers, sum(sizes), dtype=torch.float64)
        for query, logits in enumerate(self.pioneer):
            start = answers * query
            first[query, :, start : start + answers] = torch.eye(answers) - logits.softmax(0)
        for query in range(queries):
            for row in range(rows):
                start = sizes[0] + answers * (rows * query + row)
                chosen = torch.eye(answers)
                second[query, row, :, start : start + answers] = chosen - self.observer[
                    query, row
                ].softmax(0)
        return first, second

    def objective_gradient(self) -> Tensor:
        """The gradient of E[r1 + r2], by autograd; over questions, of E[r1 + mean r2]."""
        logits = self.pioneer.clone().requires_grad_(), self.observer.clone().requires_grad_()
        p1 = logits[0].softmax(-1)
        p2 = logits[1].softmax(-1)[:, :-1]
        first = (p1 * self.r1).sum() / len(self.pioneer)
        second = (p1[..., None] * p2 * self.r2[:, None]).sum() / len(self.observer)
        gradients = torch.autograd.grad(first + second, logits)
        return torch.cat([gradient.flatten() for gradient in gradients])


def world(dependence: float, seed: int = 0, answers: int = ANSWERS, queries: int = 1) -> World:
    """A random one."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[tuple[Tensor, ...]] = []
    for _ in range(queries):
        pioneer = torch.randn(answers, generator=generator)
        observer = torch.randn(answers, generator=generator)
        reading = dependence * torch.randn(answers + 1, answers, generator=generator)
        rewards = torch.randn(2, answers, generator=generator)
        parts.append((pioneer, observer + reading, *rewards))
    return World(*(torch.stack(part).double() for part in zip(*parts, strict=True)))


class Estimate(NamedTuple):
    """The mean of a gradient estimate over all outcomes, and its variance, in total or by role."""

    mean: Tensor
    variances: list[float]


def mean_and_variance(chances: Tensor, samples: Tensor) -> tuple[Tensor, float]:
    """Of (outcomes, parameters) samples with (outcomes,) chances; the variance is summed over the parameters."""
    mean = chances @ samples
    return mean, (chances @ (samples - mean).square()).sum().item()


def of_mode(mode: str, dependence: float, seed: int = 0) -> Estimate:
    """The policy gradient of one chain under a mode of credit."""
    toy = world(dependence, seed)
    p1 = toy.pioneer[0].softmax(0)
    p2 = toy.observer[0].softmax(1)
    first, second = toy.log_gradients()
    # Every outcome: what the pioneer answers, what the observer answers to it, and what it answers unread.
    a1, a2, unread = torch.cartesian_prod(*[torch.arange(ANSWERS)] * 3).T
    r1 = toy.r1[0, a1]
    credit = assign_credit([r1, toy.r2[0, a2]], mode, 1.0, [toy.r2[0, unread]])
    samples = first[0, a1] * credit[0][:, None] + second[0, a1, a2] * credit[1][:, None]
    mean, variance = mean_and_variance(p1[a1] * p2[a1, a2] * p2[-1, unread], samples)
    return Estimate(mean, [variance])


def of_batch(algorithm: str, branches: int, dependence: float, seed: int, mode: str) -> Estimate:
    """The policy gradient of a batch of two pioneers, with `branches` observers after each; variances by role.

    A role's is the mean over its responses of log-gradient times advantage, as in the first step of a learner without a
    KL term. RLOO's pioneers share the query, which is the only one; for REINFORCE each draws one of two. REINFORCE
    subtracts the mean of the batch, which includes the response itself, so what it gives is divided by
    (pioneers - 1) / pioneers; but the mean of the other branches does not.
    """
    pioneers = 2
    queries = 2 if algorithm == "reinforce" else 1
    toy = world(dependence, seed, BATCH_ANSWERS, queries)
    p1, p2 = toy.pioneer.softmax(-1), toy.observer.softmax(-1)
    first, second = toy.log_gradients()

    # Every outcome: the query of each pioneer, its answer, and those of its observers.
    choices = [torch.arange(queries)] * pioneers + [torch.arange(BATCH_ANSWERS)] * (
        pioneers * (1 + branches)
    )
    q1, a1, a2 = torch.cartesian_prod(*choices).split(
        [pioneers, pioneers, pioneers * branches], dim=1
    )
    q2 = q1.repeat_interleave(branches, dim=1)
    stems = a1.repeat_interleave(branches, dim=1)
    chances = p1[q1, a1].prod(1) * p2[q2, stems, a2].prod(1) / queries**pioneers

    def advantages(r1: Tensor, r2: Tensor) -> tuple[Tensor, Tensor]:
        """Of one outcome, by role, from the task rewards of its responses."""
        credit = assign_credit([r1, r2], mode)
        unbiased = pioneers / (pioneers - 1) if algorithm == "reinforce" else 1.0
        of_pioneers = group_advantages(credit[0], algorithm, pioneers) * unbiased
        of_observers = group_advantages(credit[1], algorithm, pioneers, branches)
        return of_pioneers, of_observers * (unbiased if branches == 1 else 1.0)

    of_pioneers, of_observers = torch.vmap(advantages)(toy.r1[q1, a1], toy.r2[q2, a2])
    pioneer_samples = (of_pioneers[..., None] * first[q1, a1]).mean(1)
    observer_samples = (of_observers[..., None] * second[q2, stems, a2]).mean(1)
    pioneer_mean, pioneer_variance = mean_and_variance(chances, pioneer_samples)
    observer_mean, observer_variance = mean_and_variance(chances, observer_samples)
    return Estimate(pioneer_mean + observer_mean, [pioneer_variance, observer_variance])


def of_questions(asked: str, branches: int, questions: int) -> Estimate:
    """The policy gradient of one pioneer, with `branches` observers, under causal credit; variances by role.

    `asked`: `each`: every observer has a question of its own, so as many as there are questions. `one`: all have the
    same one, which is drawn. Several observers have the baselines of `rloo`.
    """
    toy = world_of_questions(questions)
    p1, p2 = toy.pioneer[0].softmax(-1), toy.observer.softmax(-1)
    first, second = toy.log_gradients()

    # Every outcome: the question that is drawn, the pioneer's answer, and those of its observers.
    drawn = questions if asked == "one" else 1
    choices = [torch.arange(drawn), *[torch.arange(BATCH_ANSWERS)] * (1 + branches)]
    question, a1, a2 = torch.cartesian_prod(*choices).split([1, 1, branches], dim=1)
    question = torch.arange(branches) if asked == "each" else question
    question, stems = question.expand_as(a2), a1.expand_as(a2)
    chances = p1[a1[:, 0]] * p2[question, stems, a2].prod(1) / drawn

    def advantages(r1: Tensor, r2: Tensor) -> tuple[Tensor, Tensor]:
        """Of one outcome, by role, from the task rewards of its responses."""
        of_pioneer, of_observers = assign_credit([r1, r2], "causal")
        if branches > 1:
            of_observers = group_advantages(of_observers, "rloo", 1, branches)
        return of_pioneer, of_observers

    of_pioneer, of_observers = torch.vmap(advantages)(toy.r1[0, a1], toy.r2[question, a2])
    pioneer_samples = of_pioneer * first[0, a1[:, 0]]
    observer_samples = (of_observers[..., None] * second[question, stems, a2]).mean(1)
    pioneer_mean, pioneer_variance = mean_and_variance(chances, pioneer_samples)
    observer_mean, observer_variance = mean_and_variance(chances, observer_samples)
    return Estimate(pioneer_mean + observer_mean, [pioneer_variance, observer_variance])


def world_of_questions(questions: int) -> World:
    """A random one, with a query that the pioneer answers once for all questions."""
    toy = world(2.0, 0, BATCH_ANSWERS, questions)
    return toy._replace(pioneer=toy.pioneer[:1], r1=toy.r1[:1])
