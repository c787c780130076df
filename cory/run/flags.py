"""Signs of trouble in an iteration: the flags of metrics.jsonl, and what they mean."""

from collections.abc import Sequence
from typing import Any

import torch

from cory.metrics import collapsed, share_of_start

# What the flags in metrics.jsonl mean; each is printed once per run.
MEANING = {
    "kl": "KL {kl:.1f} is above guards.kl_bound. Try a larger ppo.init_kl_coef, a smaller ppo.learning_rate, or "
    "kl_penalty: kl (docs/paper.md, 'KL penalty').",
    "equal_rewards": "every response of the batch earned the same reward, so there is nothing to learn. Try a larger "
    "ppo.batch_size, or a task that is neither too hard nor too easy for the model.",
    "empty_responses": "more than one response in ten is empty. Look at samples.jsonl, sampling.stop and the prompts.",
    "ratio": "the probability ratio exceeded ppo.ratio_threshold, so an optimizer step had no gradient. Try a smaller "
    "ppo.learning_rate or fewer ppo.ppo_epochs.",
    "collapse": "distinct-2 of the responses fell below half of what it was at the start, so they grow alike, or KL is "
    "above guards.kl_bound. Try a larger ppo.init_kl_coef or a smaller ppo.learning_rate.",
}
EMPTY_SHARE = 0.1


def flags(
    record: dict[str, Any],
    start: dict[str, Any],
    rewards: torch.Tensor,
    completions: Sequence[str],
    kl_bound: float,
) -> list[str]:
    """The signs of trouble in an agent's iteration, as keys of MEANING.

    `record`: its metrics; `start`: those of the same role in the first iteration; `rewards`:
    (batch,) that the role is trained on (Eq. 4).
    """
    seen = {
        "kl": record["kl"] > kl_bound,
        "equal_rewards": bool((rewards == rewards[0]).all()),
        "empty_responses": sum(not text.strip() for text in completions)
        > EMPTY_SHARE * len(completions),
        "ratio": record["dropped_steps"] > 0,
        "collapse": collapsed(
            share_of_start(record["distinct_2"], start["distinct_2"]), record["kl"], kl_bound
        ),
    }
    return [name for name, here in seen.items() if here]
