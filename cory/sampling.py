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


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], chat_template: bool = False) -> list[list[int]]:
    """Token ids of prompts; with `chat_template` each as a user's turn, followed by the opening of the assistant's.

    Raises:
        UserError: the tokenizer has no chat template.
    """
    if not chat_template:
        return tokenizer(list(prompts))["input_ids"]
    if not tokenizer.chat_template:
        raise UserError(
            f"model.chat_template: expected a tokenizer with a chat template, got {tokenizer.name_or_path!r}"
        )
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template has written them


def plain_text(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, stop: Sequence[str] = ()) -> str:
    """The text of a response before its first stop text, without special tokens, also where ordinary tokens spell one.

    The text goes into another agent's prompt and to the reward function, where a special token would act as one.
    """
    text = before = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    while True:
        for token in tokenizer.all_special_tokens:
            text = text.replace(token, "")
        if text == before:
            return min((text.split(end)[0] for end in stop), key=len, default=text)
        before = text


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    queries: Sequence[torch.Tensor],
    settings: GenerationConfig,
) -> list[torch.Tensor]:
    """Samples one response per query, all in one batch. The model must be in `eval()`.

    Args:
        queries: token ids, one 1-d tensor per query.
        settings: from `generation_config`.

    Returns:
        response ids, one 1-d tensor per query on the model's device. Each ends with its first end token, or with the
        token that completes its first stop text, or at the most tokens allowed.
    """
    ids, mask = pad([query.to(model.device) for query in queries], settings.pad_token_id, "left")
    stop = settings.stop_strings or []
    options = {"tokenizer": tokenizer} if stop else {}
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings, **options)
    responses = output[:, ids.shape[1] :]
    ends = torch.isin(responses, torch.tensor(settings.eos_token_id, dtype=torch.long, device=responses.device))
    until_end = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1).cumsum(1) == 0
    rows = [row[:length] for row, length in zip(responses, until_end.sum(1).tolist(), strict=True)]
    return [row[: _length_to_stop(tokenizer, row.tolist(), stop)] for row in rows] if stop else rows


def _length_to_stop(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop: Sequence[str]) -> int:
    """Tokens up to and with the one that completes the first stop text; all, where there is none."""

    def stopped(length: int) -> bool:
        text = tokenizer.decode(ids[:length])
        return any(end in text for end in stop)

    if not stopped(len(ids)):
        return len(ids)
    low, high = 0, len(ids)  # a stop text that is there stays there as tokens are added: bisect
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle, high)
    return high


def generation_config(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: SamplingConfig, max_new_tokens: int
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
        stop_strings=sampling.stop or None,
        pad_token_id=pad_token(tokenizer),
        eos_token_id=end_tokens(policy),
    )


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id to pad with. Padding is masked everywhere, so any will do that the embedding has a row for."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0


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
