"""The metrics of runs and models, defined in docs/metrics.md. Importing this module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Titles of the metrics in tables and figures.
TITLES = {
    # Metrics of training
    "task_reward": "task reward",
    "team_reward": "team reward",
    "kl": "KL (nats)",
    "combined_reward": "combined reward",
    "distinct_2": "distinct-2",
    "response_tokens": "length (tokens)",
    # Additional metrics of an evaluation. A chain of agents answers in several model calls; its combined reward uses
    # the KL of all of them
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
HALVES = 200  # number of halves that the jackknife in `distinct_interval` draws


def combined_reward(task_reward: float, kl: float, kl_coef: float) -> float:
    """Returns the combined reward `r - eta * KL` (paper, section 4), which serves to compare CORY with PPO.

    Args:
        task_reward: mean task reward r(s0, a) of an agent's responses.
        kl: mean KL per response in nats.
        kl_coef: eta, the initial KL coefficient.
    """
    return task_reward - kl_coef * kl


def full_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns KL(pi, pi_0) over the whole vocabulary in nats (Eq. 2), with shape (...).

    Args:
        logprobs: log-probabilities of the policy pi, (..., vocabulary).
        ref_logprobs: log-probabilities of the reference pi_0, (..., vocabulary).
    """
    return logprobs.exp().mul_(logprobs - ref_logprobs).sum(-1)


def distinct(texts: Sequence[str], n: int) -> float:
    """Returns distinct-n (Li et al., 2016): the share of distinct n-grams among all word n-grams of the texts.

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
    """Returns distinct-2 divided by `start`, its value in the first iteration.

    NaN if `start` is 0, as for one-word answers.

    >>> share_of_start(0.2, 0.8), share_of_start(0.0, 0.0)
    (0.25, nan)
    """
    return distinct_2 / start if start else math.nan


def collapsed(distinct_share: float, kl: float, kl_bound: float) -> bool:
    """Whether an agent has collapsed: distinct-2 is below half of the untrained agent's, or KL is above its bound.

    Args:
        distinct_share: distinct-2 divided by the untrained agent's; NaN counts as no collapse.
        kl: KL in nats.
        kl_bound: bound on the KL, in nats.
    """
    return distinct_share < 0.5 or kl > kl_bound


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns pass@k, the probability that at least one of k samples is correct (Chen et al., 2021).

    The estimate `1 - C(n-c, k) / C(n, k)` is unbiased.

    Args:
        n: number of samples.
        c: number of correct samples.
        k: from 1 to n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def clustered(clusters: Sequence[Hashable] | None, count: int) -> list[list[int]]:
    """Groups the indices of `count` values by cluster; without clusters, each index forms its own group.

    >>> clustered(["a", "b", "a"], 3)
    [[0, 2], [1]]
    """
    members: dict[Hashable, list[int]] = {}
    for index, cluster in enumerate(range(count) if clusters is None else clusters):
        members.setdefault(cluster, []).append(index)
    return list(members.values())


def student_t(clusters: int) -> float:
    """Returns the half-width of a 95 % interval in standard errors: Student's t with `clusters - 1` degrees of freedom.

    With 1.96, from the normal distribution, intervals would be 8 % too narrow for 16 clusters, and 24 % for 6.

    >>> round(student_t(16), 3), round(student_t(500), 3)
    (2.131, 1.965)
    """
    from scipy import stats  # slow to import

    return float(stats.t.ppf(0.975, clusters - 1))


def mean_interval(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> tuple[float, float | None]:
    """Returns the mean and the half-width of its 95 % interval, from the cluster-robust standard error.

    Values in a cluster, such as answers to the same query, may depend on each other. With `n` values in `G` clusters,
    the half-width is `t / n * sqrt(G / (G - 1) * sum_g (sum_{i in g} (x_i - mean))^2)`, where `t = student_t(G)`. If
    each value is its own cluster, this is the usual `t * s / sqrt(n)`. The half-width is None for a single cluster.

    Args:
        clusters: the values' clusters. None: each value is its own cluster.

    >>> mean, half = mean_interval([1.0, 1.0, 4.0], ["a", "a", "b"])
    >>> mean, round(half, 3)  # the sums are -2 and 2: 12.706 / 3 * sqrt(2 * (4 + 4))
    (2.0, 16.942)
    """
    import torch  # slow to import

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
    """Returns distinct-n and the half-width of its 95 % interval, by the delete-half jackknife over clusters.

    A bootstrap would draw some texts twice, which lowers distinct-n. The jackknife therefore draws halves without
    replacement. If a half has `h` of `G` clusters, the standard error is `sqrt(h / (G - h))` times the standard
    deviation over the halves (Shao and Wu, 1989). The half-width is None for a single cluster.

    Args:
        clusters: the texts' clusters, each kept or left out as a whole. None: each text is its own cluster.
    """
    import torch  # slow to import

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
