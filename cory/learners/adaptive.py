"""The KL coefficient and the running reward moments: a learner's state apart from weights and optimizer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cory.config import PPOConfig
from cory.parallel import distributed


class KLController:
    """The KL coefficient eta: constant, or adaptive (Ziegler et al., 2019, arXiv 1909.08593, Section 2.2).

    The arithmetic is TRL's.
    """

    def __init__(self, ppo: PPOConfig) -> None:
        self.value = ppo.init_kl_coef
        self.ppo = ppo

    def update(self, kl: float, responses: int) -> None:
        """Updates eta after `responses` responses with a mean KL of `kl` nats."""
        if self.ppo.adaptive_kl:
            error = min(max(kl / self.ppo.kl_target - 1, -0.2), 0.2)
            self.value *= 1 + error * responses / self.ppo.kl_horizon


@dataclass
class RewardMoments:
    """Running mean and standard deviation of the training rewards, over all processes. The arithmetic is TRL's."""

    mean: float = 0.0
    std: float = 1.0
    var: float = 1.0
    count: float = 1e-24

    def update(self, rewards: Tensor) -> None:
        """Adds an update's rewards (batch,)."""
        count: float = rewards.numel() * distributed.world_size()
        if distributed.world_size() == 1:
            var, mean = torch.var_mean(rewards, unbiased=False)
        else:
            mean = distributed.all_reduce_sum(rewards.sum()) / count
            var = distributed.all_reduce_sum((rewards - mean).square().sum()) / count

        delta = mean - self.mean
        total_count = self.count + count
        # The old sum of squared deviations, plus the correction for the shift between the means.
        old_sum = self.var * self.count + delta**2 * self.count * count / total_count
        new_var = (old_sum + var * count) / total_count

        self.mean += (delta * count / total_count).item()
        self.std = (new_var * total_count / (total_count - 1)).sqrt().item()
        self.var = new_var.item()
        self.count = total_count
