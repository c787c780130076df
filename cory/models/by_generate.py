"""Sampling by transformers' `generate`, for models that remember more than keys and values, such as Mamba."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cory.models.drawing import Stopping, draw
from cory.parallel.devices import to_device


class Ended(StoppingCriteria):
    """Tells `generate` which rows are done.

    Attributes:
        lengths: of the responses that have ended, by row.
    """

    def __init__(self, stopping: Stopping, width: int) -> None:
        self.stopping = stopping
        self.width = width  # of the prompts, which stand before the responses
        self.lengths: dict[int, int] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        for row, response in enumerate(input_ids[:, self.width :].tolist()):
            if row not in self.lengths and self.stopping.has_ended(response):
                self.lengths[row] = len(response)
        done = [row in self.lengths for row in range(len(input_ids))]
        return to_device(torch.tensor(done), input_ids.device)


class Drawing(LogitsProcessor):
    """Draws each row's next token and leaves no other to `generate`, whose greedy search then takes it.

    Attributes:
        logits: of each row's tokens so far, until it has ended; empty without `keep_logits`.
    """

    def __init__(
        self,
        warp: LogitsProcessorList,
        generator: torch.Generator,
        ended: Ended,
        rows: int,
        keep_logits: bool,
    ) -> None:
        self.warp = warp
        self.generator = generator
        self.ended = ended
        self.keep_logits = keep_logits
        self.logits: list[list[torch.Tensor]] = [[] for _ in range(rows)]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.keep_logits:
            for row, logits in enumerate(scores.clone()):
                if row not in self.ended.lengths:
                    self.logits[row].append(logits)
        new = draw(self.warp(input_ids, scores).softmax(-1), self.generator)
        return torch.full_like(scores, -torch.inf).scatter(-1, new, 0.0)


def sample_by_generate(
    model: PreTrainedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    max_new_tokens: int,
    warp: LogitsProcessorList,
    generator: torch.Generator,
    stopping: Stopping,
    keep_logits: bool,
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Responses and logits, as `cory.models.sampling.sample` returns them.

    ids, mask: (rows, width), padded on the left.
    """
    # Its layers hold the adapters.
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    ended = Ended(stopping, ids.shape[1])
    drawing = Drawing(warp, generator, ended, len(ids), keep_logits)
    with _without_generation_config(base):
        whole = base.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=0,
                use_cache=True,
                disable_compile=True,
            ),
            logits_processor=LogitsProcessorList([drawing]),
            stopping_criteria=StoppingCriteriaList([ended]),
            synced_gpus=False,  # `sharding.gathered` sees to it
        )
    rows = whole[:, ids.shape[1] :].cpu()
    lengths = [ended.lengths.get(row, max_new_tokens) for row in range(len(ids))]
    responses = [row[:length].clone() for row, length in zip(rows, lengths, strict=True)]
    return responses, drawing.logits


@contextmanager
def _without_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Hides the model's own settings: `generate` reads there whatever its caller leaves open."""
    kept = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


def keeps_keys_and_values(model: PreTrainedModel | PeftModel) -> bool:
    """Whether all that a model remembers of a text are keys and values, handed over as
    `past_key_values`.

    Recurrent models keep states as well. Some take them under another name, and drop
    `past_key_values` silently.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if "past_key_values" not in inspect.signature(base.forward).parameters:
        return False
    layers = DynamicCache(config=base.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
