"""How the next token is drawn from logits, and where a response ends."""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation import logits_process

from cory.config import SamplingConfig


def warpers(settings: SamplingConfig) -> LogitsProcessorList:
    """The processors applied to logits before a token is drawn, in transformers' order; none by
    default.

    A model's own generation_config.json is ignored: Llama-2-chat's temperature of 0.6 would make
    samples off-policy.
    """
    chosen = LogitsProcessorList()
    if settings.repetition_penalty != 1.0:
        chosen.append(logits_process.RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.temperature != 1.0:
        chosen.append(logits_process.TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        chosen.append(logits_process.TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        chosen.append(logits_process.TopPLogitsWarper(settings.top_p))
    return chosen


def draw(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token per row of (rows, vocabulary) probabilities, as (rows, 1) on their device.

    Inverts the distribution function with one random number a row; `torch.multinomial` draws one
    for every token of the vocabulary. In float64, so that 50,000 sums lose nothing.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(
        len(cumulative),
        1,
        dtype=torch.float64,
        device=probabilities.device,
        generator=generator,
    )
    chosen = uniform * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, chosen, right=True)
    return tokens.clamp(max=cumulative.shape[1] - 1)


class Stopping:
    """Where responses end: with an end token, or with the token that completes a stop text.

    Args:
        ends: token ids. stop: texts.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], stop: Sequence[str]
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.ends = set(ends)
        # Tokens that surely hold a stop text.
        self.tail = 8 + max((len(text.encode()) for text in stop), default=0)

    def has_ended(self, response: list[int]) -> bool:
        """Whether a response's last token ends it."""
        if response[-1] in self.ends:
            return True
        if not self.stop:
            return False
        text = self.tokenizer.decode(response[-self.tail :])
        return any(stop in text for stop in self.stop)
