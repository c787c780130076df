"""The algorithms without a value head (REINFORCE, RLOO, GRPO and its variants), with their papers' formulas.

Each algorithm defines advantages and a loss per response; DAPO also weights the responses. The responses o_1 ... o_G
to one query form a group, with training rewards r_1 ... r_G. Where a paper takes the expectation over queries and the
mean over a group, `GroupLearner` averages over all responses. Tensors are (rows, R) unless stated, where R is the
length of the longest response in tokens.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from cory.config import AlgorithmName, Config, compares_responses
from cory.learners.losses import clipped_losses
from cory.parallel import distributed

STD_EPSILON = 1e-4  # added to a group's standard deviation, as in TRL


class ResponseTokens(NamedTuple):
    """The loss's inputs for some rows of a batch.

    Args:
        logprobs: log-probabilities under the policy being trained.
        old_logprobs: log-probabilities under the policy that sampled the responses.
        ref_logprobs: log-probabilities under the reference.
        advantages: the response's advantage, repeated at each token, and multiplied by the importance weight if an
            inference engine sampled the response.
        mask: 1 at response tokens.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def log_ratios(self) -> Tensor:
        """`log(pi / pi_old)` of each token, 0 at padding."""
        return (self.logprobs - self.old_logprobs) * self.mask


class ResponseLosses(NamedTuple):
    """Each response's loss (rows,), its probability ratios, and whether they were clipped.

    `ratio` and `is_clipped` are (rows, R), or (rows, 1) if a response has a single ratio.
    """

    losses: Tensor
    ratio: Tensor
    is_clipped: Tensor


class GroupAlgorithm(ABC):
    """Base class of the algorithms; `config` gives the clip range and the length limit."""

    kl_in_reward = False  # if false, each token's loss includes the KL to the reference

    def __init__(self, config: Config) -> None:
        self.cliprange = config.ppo.cliprange
        self.cliprange_high = config.ppo.cliprange_high
        self.max_new_tokens = config.sampling.max_new_tokens

    @staticmethod
    @abstractmethod
    def advantages(rewards: Tensor) -> Tensor:
        """Returns advantages (groups, G) from training rewards (groups, G)."""

    @abstractmethod
    def losses(self, tokens: ResponseTokens, kl_coef: float) -> ResponseLosses:
        """Returns the loss of each response."""

    def weights(self, weights: Tensor, lengths: Tensor, finished: Tensor) -> Tensor:
        """Returns each response's weight (rows,) in the mean over responses.

        Args:
            weights: factors (rows,) with mean 1. They give every rollout, an agent's responses in one role, the same
                total weight.
            lengths: number of tokens (rows,) in each of this process's responses.
            finished: whether each response (rows,) ended before its length limit.
        """
        return weights

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """`-min(ratio * A, clip(ratio) * A)`, and where the clipped term is the smaller one."""
        return clipped_losses(ratio, advantages, self.cliprange, self.cliprange_high)

    def token_losses(self, tokens: ResponseTokens, kl_coef: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns each token's loss (clipped term plus KL, 0 at padding), its ratio, and whether it was clipped."""
        ratio = tokens.log_ratios.exp()
        losses, is_clipped = self.clipped(ratio, tokens.advantages)
        if kl_coef:
            losses = losses + token_kl(tokens, ratio, kl_coef)
        return losses * tokens.mask, ratio, is_clipped


def token_kl(tokens: ResponseTokens, ratio: Tensor, kl_coef: float) -> Tensor:
    """The KL to the reference as a term of each token's loss: `eta * ratio * k3`.

    `k3 = exp(d) - d - 1`, `d = log(pi_0 / pi)` (Schulman, 2020). The ratio carries gradient, too. If it
    carried none, the term's gradient would differ from the KL's even where the ratio is 1.
    """
    gap = (tokens.ref_logprobs - tokens.logprobs) * tokens.mask
    return kl_coef * ratio * (gap.exp() - gap - 1)


class RLOO(GroupAlgorithm):
    """Ahmadian et al., 2024 (arXiv 2402.14740): the baseline is the mean reward of the group's other responses.

    A response counts as one action.
    """

    kl_in_reward = True

    @staticmethod
    def advantages(rewards: Tensor) -> Tensor:
        """`r_i - 1 / (G - 1) * sum_{j != i} r_j`, which is `G / (G - 1) * (r_i - mean(r))`."""
        group_size = rewards.shape[1]
        return (rewards - rewards.mean(1, keepdim=True)) * group_size / (group_size - 1)

    def losses(self, tokens: ResponseTokens, kl_coef: float) -> ResponseLosses:
        """`min(w A, clip(w) A)` with `w = prod_t pi / pi_old`; at `w = 1` the gradient is the paper's."""
        # A long response's ratio could overflow float32. The limit is far above any clip range.
        ratio = tokens.log_ratios.sum(1, keepdim=True).clamp(max=20.0).exp()
        losses, is_clipped = self.clipped(ratio, tokens.advantages[:, :1])
        return ResponseLosses(losses[:, 0], ratio, is_clipped)


class REINFORCE(RLOO):
    """Williams, 1992: RLOO's loss, with the mean reward of the role's batch as baseline.

    One response per query is enough.
    """

    @staticmethod
    def advantages(rewards: Tensor) -> Tensor:
        """`r - mean(r)`, where the mean covers all processes' responses."""
        # With branches (several observer responses to each pioneer response), these responses form a group.
        if rewards.shape[1] > 1:
            return RLOO.advantages(rewards)
        total = distributed.all_reduce_sum(rewards[:, 0].sum(0, keepdim=True))
        return rewards - total / distributed.world_size() / len(rewards)


class GRPO(GroupAlgorithm):
    """Shao et al., 2024 (arXiv 2402.03300), Eq. 3, with one reward per response (Section 4.1.2)."""

    @staticmethod
    def advantages(rewards: Tensor) -> Tensor:
        """`(r_i - mean(r)) / std(r)`."""
        centred = rewards - rewards.mean(1, keepdim=True)
        return centred / (rewards.std(1, keepdim=True) + STD_EPSILON)

    def losses(self, tokens: ResponseTokens, kl_coef: float) -> ResponseLosses:
        """Eq. 3: `1 / |o_i| * sum_t (min(ratio A, clip(ratio) A) - eta KL)`."""
        losses, ratio, is_clipped = self.token_losses(tokens, kl_coef)
        return ResponseLosses(losses.sum(1) / tokens.mask.sum(1), ratio, is_clipped)


class DrGRPO(GroupAlgorithm):
    """Liu et al., 2025 (arXiv 2503.20783): GRPO without dividing by a response's length or the standard deviation."""

    @staticmethod
    def advantages(rewards: Tensor) -> Tensor:
        """`r_i - mean(r)`."""
        return rewards - rewards.mean(1, keepdim=True)

    def losses(self, tokens: ResponseTokens, kl_coef: float) -> ResponseLosses:
        """`sum_t (...)` as in GRPO, divided by a constant: the length limit (their Listing 1)."""
        losses, ratio, is_clipped = self.token_losses(tokens, kl_coef)
        return ResponseLosses(losses.sum(1) / self.max_new_tokens, ratio, is_clipped)


class DAPO(GroupAlgorithm):
    """Yu et al., 2025 (arXiv 2503.14476), Eq. 8: GRPO's advantages, with equal weight on every token of the batch.

    Responses cut at their length limit are left out of the loss (Section 3.4, overlong filtering).
    """

    advantages = staticmethod(GRPO.advantages)  # Eq. 9

    def losses(self, tokens: ResponseTokens, kl_coef: float) -> ResponseLosses:
        """Eq. 8: `sum_t (...)` as in GRPO, with the ratio clipped at `1 + cliprange_high`."""
        losses, ratio, is_clipped = self.token_losses(tokens, kl_coef)
        return ResponseLosses(losses.sum(1), ratio, is_clipped)

    def weights(self, weights: Tensor, lengths: Tensor, finished: Tensor) -> Tensor:
        """Eq. 8: `1 / sum_i |o_i|` in place of `1 / G`, over the finished responses of all processes."""
        tokens = distributed.all_reduce_sum((lengths * finished).sum()) / distributed.world_size()
        return weights * finished * len(lengths) / tokens.clamp(min=1)


class GSPO(GroupAlgorithm):
    """Zheng et al., 2025 (arXiv 2507.18071), Eq. 5: one clipped ratio per response, and GRPO's advantages.

    The paper has no KL. This implementation adds GRPO's KL term, which uses each token's own ratio.
    """

    advantages = staticmethod(GRPO.advantages)  # Eq. 6

    def losses(self, tokens: ResponseTokens, kl_coef: float) -> ResponseLosses:
        """Eq. 5: `min(s A, clip(s) A)`, with `s = exp(1 / |o_i| * sum_t log(pi / pi_old))` (Eq. 7)."""
        lengths = tokens.mask.sum(1)
        ratio = (tokens.log_ratios.sum(1) / lengths).exp()[:, None]  # Eq. 7
        losses, is_clipped = self.clipped(ratio, tokens.advantages[:, :1])
        response_losses = losses[:, 0]  # Eq. 5
        if kl_coef:
            kl = token_kl(tokens, tokens.log_ratios.exp(), kl_coef)
            response_losses = response_losses + (kl * tokens.mask).sum(1) / lengths
        return ResponseLosses(response_losses, ratio, is_clipped)


GROUP_ALGORITHMS: dict[AlgorithmName, type[GroupAlgorithm]] = {
    "reinforce": REINFORCE,
    "rloo": RLOO,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
}


def group_advantages(
    rewards: Tensor, algorithm: AlgorithmName, group_size: int, branches: int = 1
) -> Tensor:
    """Returns each response's advantage, computed from its role's rewards only.

    Args:
        rewards: training rewards (rows,), one group after the other.
        algorithm: a name in `GROUP_ALGORITHMS`.
        group_size: number of responses to a query, which form a group. REINFORCE compares the whole batch instead.
        branches: number of observer responses to each pioneer response. If above 1, these responses form the group.

    >>> group_advantages(Tensor([1.0, 3.0, 5.0, 5.0]), "rloo", 2).tolist()
    [-2.0, 2.0, 0.0, 0.0]
    """
    if branches > 1:
        group_size = branches
    elif not compares_responses(algorithm):
        group_size = 1
    return GROUP_ALGORITHMS[algorithm].advantages(rewards.view(-1, group_size)).flatten()


def share_of_equal_groups(rewards: Tensor, group_size: int) -> float:
    """Returns the share of groups whose rewards are all equal, over all processes.

    >>> share_of_equal_groups(Tensor([1.0, 3.0, 5.0, 5.0]), 2)
    0.5
    """
    groups = rewards.view(-1, group_size)
    equal = (groups == groups[:, :1]).all(1).float().mean()
    return (distributed.all_reduce_sum(equal) / distributed.world_size()).item()
