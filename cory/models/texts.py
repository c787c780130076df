"""A batch of texts that a model continues token by token, with a cache that grows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cory.models.window import KeysAndValues, Stems, accepts, pad, whole_mask
from cory.parallel.devices import to_device


@dataclass
class Texts:
    """A batch of texts, one per row, of which a model reads the newest tokens and predicts the next.

    Args:
        model: which reads them.
        ids: (rows, tokens) the prompts, padded on the left, and the responses so far.
        mask: (rows, positions) 0 at padding, over what is in the cache and `new`. As wide as `ids`,
            unless common beginnings were read first and padded for themselves.
        new: (rows, tokens) what the next pass reads: at first the prompts, or what is left of them;
            then the token that was drawn.
        position: (rows, tokens) where `new` stands in the text.
        cache: keys and values of what has been read.
        is_padded: of each row, whether its mask has a 0.
    """

    model: PreTrainedModel
    ids: Tensor
    mask: Tensor
    new: Tensor
    position: Tensor
    cache: DynamicCache
    is_padded: list[bool]

    @cached_property
    def _options(self) -> list[str]:
        """Of what a pass may be told, what the model takes."""
        return [name for name in ("logits_to_keep", "position_ids") if accepts(self.model, name)]

    def read(self) -> Tensor:
        """Reads `new`. The logits of the token after it, (rows, vocabulary)."""
        mask = whole_mask(self.model, self.mask, self.new.shape[1], any(self.is_padded))
        options: dict[str, Any] = {"logits_to_keep": 1, "position_ids": self.position}
        options = {name: options[name] for name in self._options}
        output = self.model(
            self.new,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            **options,
        )
        return output.logits[:, -1]

    def append(self, tokens: Tensor) -> None:
        """Adds the next token of each row, (rows, 1)."""
        self.new = tokens
        self.ids = torch.cat([self.ids, tokens], 1)
        self.mask = torch.cat([self.mask, self.mask[:, -1:]], 1)
        self.position = self.position[:, -1:] + 1

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices, of which one may occur several times."""
        index = to_device(torch.tensor(rows), self.ids.device)
        self.ids = self.ids[index]
        self.mask = self.mask[index]
        self.new = self.new[index]
        self.position = self.position[index]
        self.cache.batch_select_indices(index)
        self.is_padded = [self.is_padded[row] for row in rows]


def padded(
    prompts: Sequence[tuple[int, ...]], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Prompts as (rows, width) ids and their mask, on `device`."""
    ids, mask = pad([torch.tensor(prompt) for prompt in prompts], pad_id, "left")
    # Padding repeats a token of the row, so that a repetition penalty finds nothing in it.
    ids = torch.where(mask.bool(), ids, ids[:, -1:])
    return to_device(ids, device), to_device(mask, device)


def unread(model: PreTrainedModel, ids: Tensor, mask: Tensor, is_padded: list[bool]) -> Texts:
    """Prompts of which nothing has been read."""
    position = (mask.cumsum(1) - 1).clamp(min=0)
    cache = KeysAndValues(config=model.config)
    return Texts(model, ids, mask, ids, position, cache, is_padded)


def with_stems_read(model: PreTrainedModel, begun: Stems, ids: Tensor) -> Texts:
    """Prompts whose common beginnings have been read."""
    padded = pad([torch.tensor(rest) for rest in begun.rests], 0, "left")
    new, new_mask = (to_device(tensor, ids.device) for tensor in padded)
    mask = torch.cat([begun.mask, new_mask], 1)
    position = (mask.cumsum(1) - 1)[:, -new.shape[1] :]
    return Texts(model, ids, mask, new, position, begun.cache, [True] * len(ids))
