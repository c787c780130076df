"""Compares an inference engine's log-probabilities with the policy's, and gives importance weights for the loss.

R is the length of the longest response in tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cory.config import EngineCorrection, SamplingConfig
from cory.errors import UserError
from cory.parallel import distributed
from cory.parallel.devices import to_device
from cory.rollout import Rollout

MAX_DIFFERENCE = 0.5  # nats per token; a larger difference means that the engine has other weights


class EngineSamples(NamedTuple):
    """Comparison of an engine's samples with the policy. The three numbers cover all processes.

    Args:
        weights: importance weights that multiply the advantages: (rows, R) by token, or (rows, 1) by response.
        difference: mean of `abs(log pi - log pi_engine)` over the response tokens.
        ratio: mean of the weights.
        capped: share of importance ratios above the cap.
    """

    weights: Tensor
    difference: float
    ratio: float
    capped: float


def compare_samples(
    rollouts: Sequence[Rollout], logprobs: Tensor, mask: Tensor, sampling: SamplingConfig
) -> EngineSamples:
    """Compares the engine's log-probabilities with the policy's, `logprobs` (rows, R).

    Raises a UserError if the difference is so large that the engine must have sampled from other weights.
    """
    sampled = [values for rollout in rollouts for values in rollout.logprobs]
    engine_logprobs = torch.zeros(logprobs.shape)
    for row, values in enumerate(sampled):
        engine_logprobs[row, : len(values)] = values
    gaps = (logprobs - to_device(engine_logprobs, logprobs.device)) * mask
    total, tokens = distributed.all_reduce_sum(torch.stack([gaps.abs().sum(), mask.sum()])).tolist()
    difference = total / tokens
    if not difference <= MAX_DIFFERENCE:
        raise UserError(
            "sampling.engine: expected responses sampled with the agent's weights, got log-probabilities that differ "
            f"by {difference:.2f} nats a token (limit {MAX_DIFFERENCE}). The server must hold the model `model.name` "
            "and serve no other run."
        )
    weights, is_capped = importance_weights(
        gaps, sampling.engine_correction, sampling.engine_correction_cap
    )
    counted = mask if weights.shape == mask.shape else torch.ones_like(weights)
    sums = [(weights * counted).sum(), (is_capped * counted).sum(), counted.sum()]
    ratio_sum, capped_sum, count = distributed.all_reduce_sum(torch.stack(sums)).tolist()
    return EngineSamples(weights, difference, ratio_sum / count, capped_sum / count)


def importance_weights(
    gaps: Tensor, correction: EngineCorrection, cap: float
) -> tuple[Tensor, Tensor]:
    """Returns the ratio `pi / pi_engine` per token or response, and whether it exceeds the cap.

    Ratios above the cap are set to the cap (`*_truncate`) or to 0 (`*_mask`). The names and the default,
    `sequence_mask` with cap 3, follow TRL's `vllm_importance_sampling_mode`.

    Args:
        gaps: `log pi - log pi_engine` of each token (rows, R), 0 at padding.
    """
    if correction == "none":
        return torch.ones_like(gaps), torch.zeros_like(gaps)
    if correction.startswith("sequence"):
        gaps = gaps.sum(1, keepdim=True)
    ratios = gaps.exp()
    is_capped = ratios > cap
    return ratios.masked_fill(is_capped, 0.0 if correction.endswith("mask") else cap), is_capped
