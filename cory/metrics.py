"""The metrics by which runs and models are judged: docs/metrics.md. Importing this does not import torch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from cory.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

# What every table and figure calls a metric.
TITLES = {
    # Of training.
    "task_reward": "task reward",
    "team_reward": "team reward",
    "kl": "KL (nats)",
    "combined_reward": "combined reward",
    "distinct_2": "distinct-2",
    "response_tokens": "length (tokens)",
    # Of an evaluation, besides; a chain's combined reward has the KL of all its calls.
    "chain_kl": "KL, all calls (nats)",
    "chain_sampled_kl": "sampled KL, all calls (nats)",
    "distinct_1": "distinct-1",
    "tokens": "length (tokens)",
    "perplexity": "perplexity under base",
    "best_of_2": "task reward, best of 2",
    "calls": "calls",
    "tokens_read": "tokens read",
    "tokens_written": "tokens written",
    "frac_reward_zero_std": "share of equal groups",
}
HELD_OUT_REWARDS = ("eval_task_reward", "eval_team_reward")  # measured with `eval_every`
CURVES = ("task_reward", "kl", "combined_reward")  # in every table and figure of a run
HALVES = 200  # that the jackknife of `distinct_interval` draws


def combined_reward(task_reward: float, kl: float, kl_coef: float) -> float:
    """`r_c = r - eta * KL` (paper, section 4): the objective on which CORY and PPO are compared.

    Args:
        task_reward: mean r(s0, a) of an agent's own responses.
        kl: mean KL per response in nats.
        kl_coef: eta, the initial KL coefficient.
    """
    return task_reward - kl_coef * kl


def full_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(pi, pi_0) over the whole vocabulary (Eq. 2): from (..., vocabulary) log-probabilities, (...), in nats."""
    return logprobs.exp().mul_(logprobs - ref_logprobs).sum(-1)


def distinct(texts: Sequence[str], n: int) -> float:
    """Distinct-n (Li et al., 2016): distinct n-grams of words over all n-grams, of all texts together.

    >>> distinct(["good good film", "good film"], 1)
    0.4
    """
    grams = [
        tuple(words[i : i + n])
        for words in map(str.split, texts)
        for i in range(len(words) - n + 1)
    ]
    return len(set(grams)) / len(grams) if grams else 0.0


def share_of_start(distinct_2: float, start: float) -> float:
    """Distinct-2 over that of the first iteration; NaN where that is 0, as of answers of one word.

    >>> share_of_start(0.2, 0.8), share_of_start(0.0, 0.0)
    (0.25, nan)
    """
    return distinct_2 / start if start else math.nan


def collapsed(distinct_share: float, kl: float, kl_bound: float) -> bool:
    """Collapse: distinct-2 below half of an untrained agent's, or KL (nats) above its bound.

    `distinct_share`: distinct-2 over the untrained agent's; NaN says nothing.
    """
    return distinct_share < 0.5 or kl > kl_bound


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct (Chen et al., 2021): `1 - C(n-c, k) / C(n, k)`.

    Args:
        n: samples drawn.
        c: correct samples.
        k: at most n, else a UserError is raised.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= n:
        raise UserError(f"pass@k: expected k from 1 to the number of samples, {n}, got {k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def clustered(clusters: Sequence[Hashable] | None, count: int) -> list[list[int]]:
    """The indices of `count` values, cluster by cluster; without clusters each value is one.

    >>> clustered(["a", "b", "a"], 3)
    [[0, 2], [1]]
    """
    members: dict[Hashable, list[int]] = {}
    for index, cluster in enumerate(range(count) if clusters is None else clusters):
        members.setdefault(cluster, []).append(index)
    return list(members.values())


def student_t(clusters: int) -> float:
    """The half-width of a 95 % interval in standard errors: Student's t with one degree of freedom less than clusters.

    The normal distribution's 1.96 would be 8 % too narrow for 16 queries, and 24 % for 6.

    >>> round(student_t(16), 3), round(student_t(500), 3)
    (2.131, 1.965)
    """
    from scipy import stats  # here, as importing it takes a while

    return float(stats.t.ppf(0.975, clusters - 1))


def mean_interval(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> tuple[float, float | None]:
    """Mean and the half-width of its 95 % interval, from the cluster-robust standard error of a mean.

    Values of one cluster, such as those of a query that is asked twice, may depend on each other. With `n` values in
    `G` clusters: `t / n * sqrt(G / (G - 1) * sum_g (sum_{i in g} (x_i - mean))^2)`, t of `student_t(G)`. Where each
    value is a cluster this is the usual `t * s / sqrt(n)`. One cluster has no interval: None.

    Args:
        clusters: of each value. None: each value is one of its own.

    >>> mean, half = mean_interval([1.0, 1.0, 4.0], ["a", "a", "b"])
    >>> mean, round(half, 3)  # the sums are -2 and 2: 12.706 / 3 * sqrt(2 * (4 + 4))
    (2.0, 16.942)
    """
    import torch  # here, as importing it takes seconds

    x = torch.as_tensor(values, dtype=torch.float64)
    mean = x.mean()
    deviations = (x - mean).tolist()
    sums = [
        math.fsum(deviations[index] for index in cluster) for cluster in clustered(clusters, len(x))
    ]
    if len(sums) < 2:
        return mean.item(), None
    variance = len(sums) / (len(sums) - 1) * math.fsum(total**2 for total in sums) / len(x) ** 2
    return mean.item(), student_t(len(sums)) * math.sqrt(variance)


def distinct_interval(
    texts: Sequence[str], n: int, clusters: Sequence[Hashable] | None = None
) -> tuple[float, float | None]:
    """Distinct-n of `texts` and the half-width of its 95 % interval, by the delete-half jackknife over clusters.

    A bootstrap would draw the same text twice and so lower distinct-n. Halves drawn without replacement do not, and
    their spread estimates the standard error of the whole (Shao and Wu, 1989): with halves of `h` of `G` clusters it is
    `sqrt(h / (G - h))` times their standard deviation. One cluster has no interval: None.

    Args:
        clusters: of each text, which are left out or kept whole. None: each text is one of its own.
    """
    import torch  # here, as importing it takes seconds

    groups = clustered(clusters, len(texts))
    if len(groups) < 2:
        return distinct(texts, n), None
    generator = torch.Generator().manual_seed(0)
    size = (len(groups) + 1) // 2
    halves = [
        torch.randperm(len(groups), generator=generator)[:size].tolist() for _ in range(HALVES)
    ]
    values = [
        distinct([texts[index] for group in half for index in groups[group]], n) for half in halves
    ]
    spread = torch.tensor(values, dtype=torch.float64).std().item()
    standard_error = math.sqrt(size / (len(groups) - size)) * spread
    return distinct(texts, n), student_t(len(groups)) * standard_error
