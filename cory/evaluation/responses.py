"""Answers to prompts, with their KL to a base, and their rewards in a task."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.config import SamplingConfig
from cory.errors import UserError
from cory.evaluation.agents import Weights
from cory.learners.head import WHOLE, limit
from cory.metrics import full_kl
from cory.models import window
from cory.models.load import adapter_tokenizer, attach, load_answering
from cory.models.sample import sample
from cory.models.text import (
    are_turns,
    check_lengths,
    context_length,
    encode,
    pad_token,
    plain_texts,
)
from cory.parallel.devices import to_device
from cory.rewards import Scores, score_by_function
from cory.roles import Prompt, fit_responses
from cory.streams import Purpose, Stream
from cory.task import Task

# Model, base (None: the model with its adapters off) and tokenizer.
LoadedModel: TypeAlias = tuple[PreTrainedModel, PreTrainedModel | None, PreTrainedTokenizerBase]


@dataclass
class Responses:
    """Answers to prompts, as columns.

    Args:
        prompts: what is answered.
        completions: the answers' texts.
        prompt_tokens: the lengths of the prompts.
        kl: to the base, in nats per response.
        base_nll: their negative log-likelihood under the base, in nats per response.
        tokens: their lengths, with the end token.
    """

    prompts: list[Prompt]
    completions: list[str]
    prompt_tokens: list[int]
    kl: list[float]
    base_nll: list[float]
    tokens: list[int]


def load(weights: Weights, device: torch.device) -> LoadedModel:
    """Loads a model that answers, and the base to which its KL is measured."""
    model, adapter, base = weights
    # A run that started from an adapter has merged it and trained others on that.
    policy, tokenizer = load_answering(model, device, merge=adapter is not None)
    # A chat template changes prompts, not weights.
    is_base = replace(model, chat_template=base.chat_template) == base
    if adapter is not None:
        policy = attach(policy, adapter).eval()
        tokenizer = adapter_tokenizer(adapter, policy, tokenizer)
        return policy, None if is_base else load_answering(base, device)[0], tokenizer
    return policy, policy if is_base else load_answering(base, device)[0], tokenizer


@torch.no_grad()
def respond(
    model: PreTrainedModel,
    base: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    sampling: SamplingConfig,
    batch_size: int = 64,
    seed: int = 0,
    chat_template: bool | Mapping[str, Any] = False,
    kl: bool = True,
    date: str | None = None,
) -> Responses:
    """Samples one response of at most `sampling.max_new_tokens` tokens per prompt.

    Batches hold prompts of similar length, at most `batch_size`, and with `kl` no more than whose
    logits (rows, max_new_tokens, vocabulary) are `WHOLE`. KL is to `base`, or where that is None to
    the model with its adapters off, under the same prompt; without `kl` it and
    `base_nll` are 0.

    Raises a UserError: a prompt is too long for the model, model and base differ in their
    vocabulary, or a probability is not finite.
    """
    if base is not None:
        ours, theirs = (one.config.get_text_config().vocab_size for one in (model, base))
        if ours != theirs:
            raise UserError(
                f"expected a model with the base's vocabulary of {theirs}, for a KL between them, "
                f"got {ours} in {model.name_or_path!r}"
            )
    queries = [
        torch.tensor(ids, dtype=torch.long)
        for ids in encode(tokenizer, prompts, chat_template, date)
    ]
    lengths = [len(query) for query in queries]
    check_lengths(lengths, sampling.max_new_tokens, context_length(model), list(prompts))
    model.eval()
    generator = Stream(seed, Purpose.EVALUATION).torch(model.device)

    count = len(queries)
    result = Responses(
        prompts=list(prompts),
        completions=[""] * count,
        prompt_tokens=lengths,
        kl=[0.0] * count,
        base_nll=[0.0] * count,
        tokens=[0] * count,
    )
    is_turn = are_turns(prompts, chat_template)
    if kl:
        row = sampling.max_new_tokens * model.config.get_text_config().vocab_size
        batch_size = max(1, min(batch_size, limit(WHOLE, model.device) // row))
    by_length = sorted(range(count), key=lambda i: lengths[i])
    for start in range(0, count, batch_size):
        batch = by_length[start : start + batch_size]
        query_ids = [queries[i] for i in batch]
        responses, logits = sample(
            model,
            tokenizer,
            query_ids,
            sampling,
            sampling.max_new_tokens,
            generator,
            keep_logits=kl,
        )
        texts = plain_texts(tokenizer, responses, sampling.stop, is_turn)
        for i, response, text in zip(batch, responses, texts, strict=True):
            result.completions[i] = text
            result.tokens[i] = len(response)
        if not kl:
            continue
        base_logits = None
        if base is not model:
            with model.disable_adapter() if base is None else nullcontext():
                base_logits = window.response_logits(
                    base or model, query_ids, responses, pad_token(tokenizer)
                )
        distances = _distances(responses, logits, base_logits)
        for i, (kl_of, base_nll) in zip(batch, distances, strict=True):
            if not math.isfinite(kl_of):
                raise UserError(
                    f"expected finite probabilities, got a KL of {kl_of} between {model.name_or_path!r} and its "
                    f"base, for the prompt {prompts[i]!r}"
                )
            result.kl[i] = kl_of
            result.base_nll[i] = base_nll
        del logits, base_logits  # before the next batch needs their memory
    return result


def _distances(
    responses: Sequence[torch.Tensor],
    logits: Sequence[Sequence[torch.Tensor]],
    base_logits: torch.Tensor | None,
) -> Iterator[tuple[float, float]]:
    """Each response's KL to the base, and its negative log-likelihood under it, in nats.

    Args:
        responses: token ids, (T_i,).
        logits: of each response, T_i of (V,).
        base_logits: (B, max T_i, V); None: the base is the model itself.
    """
    kls: list[torch.Tensor] = []
    base_nlls: list[torch.Tensor] = []
    # A response at a time, as a processor's cache holds one's vocabulary, not a batch's.
    for row, response in enumerate(responses):
        logprobs = torch.stack(list(logits[row])).float().log_softmax(-1)
        base_logprobs = logprobs
        if base_logits is not None:
            base_logprobs = base_logits[row, : len(response)].float().log_softmax(-1)
        tokens = to_device(response, logprobs.device)[:, None]
        kls.append(full_kl(logprobs, base_logprobs).sum())
        base_nlls.append(-base_logprobs.gather(-1, tokens)[:, 0].sum())
    # One tensor leaves the device, so that the program waits for it once a batch.
    kl, base_nll = torch.stack([*kls, *base_nlls]).cpu().chunk(2)
    return zip(kl.tolist(), base_nll.tolist(), strict=True)


def reply(
    loaded: LoadedModel,
    task: Task,
    columns: Mapping[str, Sequence[Any]],
    sampling: SamplingConfig,
    read: Sequence[Sequence[str]] | None = None,
    role: int = 0,
    **options: Any,
) -> Responses:
    """A response to each row of a task.

    Args:
        loaded: model, base and tokenizer.
        columns: of the rows, `prompt` among them.
        sampling: of roles without limits of their own.
        read: the responses of each earlier role, which a later one reads; None: the prompts are the
            pioneer's.
        role: whose prompts and limits these are.
        options: `batch_size`, `seed`, `chat_template`, `kl` and `date` of `respond`.
    """
    model, base, tokenizer = loaded
    sampling = task.prompts.settings(role).sampling(sampling)
    if read is None:
        prompts = task.render(0, columns)
    else:
        prompts = fit_responses(
            partial(task.render, role, columns),
            read,
            partial(
                encode,
                tokenizer,
                chat_template=options.get("chat_template", False),
                date=options.get("date"),
            ),
            context_length(model),
            sampling.max_new_tokens,
        )
    return respond(model, base, tokenizer, prompts, sampling, **options)


def answer(
    loaded: LoadedModel,
    task: Task,
    columns: Mapping[str, Sequence[Any]],
    sampling: SamplingConfig,
    read: Sequence[Sequence[str]] | None = None,
    role: int = 0,
    **options: Any,
) -> tuple[Responses, Scores]:
    """A response to each row of a task, as `reply` gives it, and their task rewards. The reward learns the role."""
    responses = reply(loaded, task, columns, sampling, read, role, **options)
    other_columns = {name: values for name, values in columns.items() if name != "prompt"}
    other_columns["role"] = [task.prompts.name(role)] * len(responses.completions)
    # Rewards are computed as in training.
    with torch.autocast(loaded[0].device.type, enabled=False):
        scores = score_by_function(
            task.reward, columns["prompt"], responses.completions, other_columns
        )
    return responses, scores
