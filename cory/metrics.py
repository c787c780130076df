"""The metrics by which runs and models are judged; formulas in docs/metrics.md."""

import math
from collections.abc import Sequence

import torch

from cory.errors import expect


def combined_reward(task_reward: float, kl: float, kl_coef: float) -> float:
    """`r_c = r - eta * KL` (paper, section 4): the objective on which CORY and PPO are compared.

    Args:
        task_reward: mean r(s0, a) of an agent's own responses.
        kl: mean KL per response in nats.
        kl_coef: eta, the initial KL coefficient.
    """
    return task_reward - kl_coef * kl


def full_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(pi, pi_0) over the whole vocabulary (Eq. 2): from (..., vocabulary) log-probabilities, (...), in nats."""
    return logprobs.exp().mul_(logprobs - ref_logprobs).sum(-1)


def distinct(texts: Sequence[str], n: int) -> float:
    """Distinct-n (Li et al., 2016): distinct n-grams of words over all n-grams, of all texts together.

    >>> distinct(["good good film", "good film"], 1)
    0.4
    """
    grams = [tuple(words[i : i + n]) for words in map(str.split, texts) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def collapsed(distinct_share: float, kl: float, kl_bound: float) -> bool:
    """Collapse: distinct-2 below half of the role's in the first iteration, or KL (nats) above its bound."""
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
    expect(1 <= k <= n, "pass@k", f"k from 1 to the number of samples, {n}", k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and the half-width of its 95 % interval (normal approximation; 0 for fewer than two values)."""
    x = torch.as_tensor(values, dtype=torch.float64)
    return x.mean().item(), 1.96 * x.std().item() / math.sqrt(len(x)) if len(x) > 1 else 0.0


def distinct_interval(texts: Sequence[str], n: int, resamples: int = 200, seed: int = 0) -> tuple[float, float]:
    """Distinct-n of `texts` and the half-width of its 95 % interval, by the delete-half jackknife over texts.

    A bootstrap would draw the same text twice and so lower distinct-n. Halves drawn without replacement do not, and
    their spread estimates the standard error of the whole (Shao and Wu, 1989).
    """
    generator = torch.Generator().manual_seed(seed)
    size = (len(texts) + 1) // 2
    halves = [torch.randperm(len(texts), generator=generator)[:size].tolist() for _ in range(resamples)]
    values = torch.tensor([distinct([texts[i] for i in half], n) for half in halves], dtype=torch.float64)
    return distinct(texts, n), 1.96 * values.std().item()
