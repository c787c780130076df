"""Sampling responses: from token ids to token ids, in one batch, and their text."""

import random
from collections.abc import Sequence

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from cory.config import SamplingConfig, UserError
from cory.window import pad


def seed_everything(*key: int) -> None:
    """Seeds Python, NumPy and torch from `key`, e.g. (seed, iteration, process)."""
    state = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(state)
    np.random.seed(state)
    torch.manual_seed(state)


def plain_text(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> str:
    """The text of a response without special tokens, also where ordinary tokens spell one out.

    The text goes into another agent's prompt and to the reward function, where a special token would act as one.
    """
    text = before = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    while True:
        for token in tokenizer.all_special_tokens:
            text = text.replace(token, "")
        if text == before:
            return text
        before = text


@torch.no_grad()
def sample(
    model: PreTrainedModel, queries: Sequence[torch.Tensor], config: GenerationConfig, pad_id: int
) -> list[torch.Tensor]:
    """Samples one response per query, all in one batch. The model must be in `eval()`.

    Args:
        queries: token ids, one 1-d tensor per query.

    Returns:
        response ids, one 1-d tensor per query on the model's device, each up to and with its first end token.
    """
    ids, mask = pad([query.to(model.device) for query in queries], pad_id, "left")
    responses = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, ids.shape[1] :]
    ends = torch.isin(responses, torch.tensor(config.eos_token_id, dtype=torch.long, device=responses.device))
    until_end = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1).cumsum(1) == 0
    return [row[:length] for row, length in zip(responses, until_end.sum(1).tolist(), strict=True)]


def generation_config(
    policy: PreTrainedModel, sampling: SamplingConfig, max_new_tokens: int, pad_id: int
) -> GenerationConfig:
    """How responses are sampled. States every setting that a model may bring a default of its own for.

    (Llama-2-chat comes with temperature 0.6 and top-p 0.9: its samples would be off-policy.)
    """
    return GenerationConfig(
        do_sample=True,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        min_new_tokens=0,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=0.0,
        typical_p=1.0,
        repetition_penalty=sampling.repetition_penalty,
        no_repeat_ngram_size=0,
        pad_token_id=pad_id,
        eos_token_id=end_tokens(policy),
    )


def end_tokens(policy: PreTrainedModel) -> list[int]:
    """The ids that end a response; empty for a model that has none."""
    ends = policy.generation_config.eos_token_id
    ends = policy.config.eos_token_id if ends is None else ends
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]


def check_lengths(lengths: list[int], max_new_tokens: int, context: int | None, prompts: list[str]) -> None:
    """Raises a UserError that names the first row with no tokens, or too many for the model's context."""
    for row, length in enumerate(lengths):
        if length == 0:
            raise UserError(f"prompt in row {row}: expected at least one token, got {prompts[row]!r}")
        if context is not None and length + max_new_tokens > context:
            raise UserError(
                f"prompt in row {row}: expected at most {context} tokens, the model's context, "
                f"got {length} of the prompt + {max_new_tokens} of the response = {length + max_new_tokens}"
            )


def context_length(model: PreTrainedModel) -> int | None:
    """Tokens that the model can attend to, where its configuration says."""
    return getattr(model.config, "max_position_embeddings", None)
