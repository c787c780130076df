"""The gradient under each mode of credit on a two-step toy policy, enumerated exactly: its mean and its variance.

    python benchmarks/credit.py

A pioneer draws one of a few answers, an observer that has read it draws one, and rewards are tables. `dependence` is
how much the observer's policy heeds what it has read: with 0 it does not read at all. The objective is Eq. 4's,
E[r1 + r2]. The mean gradient is compared with the objective's own, by autograd; variances are sums over all parameters
of one sample's.
"""

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cory.credit import assign_credit

MODES = ("collective", "causal", "counterfactual", "own")
ANSWERS = 4


def world(dependence: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random logits of the pioneer (answers,) and of the observer (answers + 1, answers), and rewards (answers,) each.

    The observer's row i is for a pioneer that answered i; the last row is for one that it has not read.
    """
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(ANSWERS, generator=generator), torch.randn(ANSWERS, generator=generator)
    reading = dependence * torch.randn(ANSWERS + 1, ANSWERS, generator=generator)
    logits = (first, second + reading)
    rewards = torch.randn(2, ANSWERS, generator=generator)
    return *(x.double().requires_grad_() for x in logits), *rewards.double()


def gradients(mode: str, dependence: float, seed: int = 0) -> tuple[torch.Tensor, float]:
    """The mean over all samples of the policy gradient under a mode of credit, and its variance."""
    pioneer, observer, r1, r2 = world(dependence, seed)
    p1, p2 = pioneer.softmax(0).detach(), observer.softmax(1).detach()
    chances, samples = [], []
    for a1, a2, unread in itertools.product(range(ANSWERS), repeat=3):
        chances.append(p1[a1] * p2[a1, a2] * p2[-1, unread])
        rewards = [r1[a1][None], r2[a2][None]]
        credit = assign_credit(rewards, mode, 1.0, [r1[a1][None], r2[unread][None]])
        surprise = pioneer.log_softmax(0)[a1] * credit[0][0] + observer.log_softmax(1)[a1, a2] * credit[1][0]
        samples.append(torch.cat([g.flatten() for g in torch.autograd.grad(surprise, (pioneer, observer))]))
    weights, rows = torch.stack(chances)[:, None], torch.stack(samples)
    mean = (weights * rows).sum(0)
    return mean, (weights * (rows - mean).square()).sum().item()


def objective_gradient(dependence: float, seed: int = 0) -> torch.Tensor:
    """The gradient of E[r1 + r2], by autograd."""
    pioneer, observer, r1, r2 = world(dependence, seed)
    p1, p2 = pioneer.softmax(0), observer.softmax(1)[:ANSWERS]
    value = (p1 * r1).sum() + (p1[:, None] * p2 * r2).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, (pioneer, observer))])


def main() -> None:
    """Prints a table over dependences, means over 20 worlds."""
    print("| dependence | mode | largest difference to the gradient of E[r1 + r2] | variance |\n|---|---|---|---|")
    for dependence, mode in itertools.product((0.0, 0.5, 1.0, 2.0), MODES):
        found = [gradients(mode, dependence, seed) for seed in range(20)]
        far = max((g - objective_gradient(dependence, s)).abs().max().item() for s, (g, _) in enumerate(found))
        print(f"| {dependence:g} | {mode} | {far:.1e} | {sum(v for _, v in found) / len(found):.3f} |")


if __name__ == "__main__":
    main()
