"""Encodes each shared prompt prefix, called a stem, only once.

A stem can be the whole prompt of several rows, the examples of a few-shot prompt, or a system prompt. Passes without
gradient encode stems first and keep their keys and values (`read_stems`). In training, several rows are laid out behind
one copy of their stem (`share_prompts`, after Prefix Grouper, arXiv 2506.05433).
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cory.models.window import (
    PassInputs,
    Window,
    attends_by_positions,
    forward,
    pack,
    pad,
    whole_mask,
)
from cory.parallel.devices import to_device
from cory.parallel.sharding import device_of

# Stems are shared only if the pass then takes at most this fraction of a plain pass's work.
WORTHWHILE = 0.9


def stems_of(prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns each prompt's stem.

    Prompts are sorted by their tokens and grouped by stem. A prompt joins the preceding group if that saves more than a
    quarter of its tokens, and starts a new group otherwise. The last token of a prompt never belongs to its stem, as it
    predicts the first response token.

    >>> stems_of([(1, 2, 3, 4, 5), (7, 8, 9), (1, 2, 3, 6, 5)])
    [(1, 2, 3), (7, 8), (1, 2, 3)]
    """
    groups: list[tuple[tuple[int, ...], list[int]]] = []  # stem and indices of its prompts
    for i in sorted(range(len(prompts)), key=lambda i: prompts[i]):
        prompt = prompts[i][:-1]
        stem, members = groups[-1] if groups else ((), [])
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(stem, prompt, strict=False))
        common = prompt[: len(list(pairs))]
        # A shorter stem saves less for each earlier member of the group.
        saved = len(common) - (len(stem) - len(common)) * (len(members) - 1)
        if saved > len(prompt) / 4:
            groups[-1] = (common, [*members, i])
        else:
            groups.append((prompt, [i]))
    return [stem for _, stem in sorted((i, stem) for stem, members in groups for i in members)]


class KeysAndValues(DynamicCache):
    """A cache that stores keys in the dtype of the values.

    Under autocast, rotary embeddings leave keys in float32, but attention reads keys and values in one dtype. Without
    this class, each new token's pass would round all earlier keys again.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return super().update(
            key_states.to(value_states.dtype), value_states, layer_idx, *args, **kwargs
        )


class Stems(NamedTuple):
    """Encoded stems: cache and mask, with one row per prompt, and each prompt's tokens after its stem."""

    cache: DynamicCache
    mask: Tensor
    rests: list[tuple[int, ...]]


def read_stems(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], pad_id: int
) -> Stems | None:
    """Encodes each stem of the prompts once.

    Returns None if that saves less than a fifth of the prompts' tokens, or if the model would count the padding between
    a stem and the rest of its prompt as positions.
    """
    if not attends_by_positions(model):
        return None
    stems = stems_of(prompts)
    device = device_of(model)
    rows = {stem: row for row, stem in enumerate(dict.fromkeys(stems))}
    saved = sum(map(len, stems)) - sum(map(len, rows))
    if () in rows or saved < sum(map(len, prompts)) / 5:  # too little to justify a second pass
        return None
    padded = pad([torch.tensor(stem) for stem in rows], pad_id, "left")
    ids, mask = (to_device(tensor, device) for tensor in padded)
    cache = KeysAndValues(config=model.config)
    is_padded = len(set(map(len, rows))) > 1
    pass_mask = whole_mask(model, mask, ids.shape[1], is_padded)
    forward(model, ids, pass_mask, (mask.cumsum(1) - 1).clamp(min=0), 1, cache=cache)
    copies = to_device(torch.tensor([rows[stem] for stem in stems]), device)
    cache.batch_select_indices(copies)
    return Stems(
        cache, mask[copies], [p[len(stem) :] for p, stem in zip(prompts, stems, strict=True)]
    )


def response_logits(
    model: PreTrainedModel, queries: Sequence[Tensor], responses: Sequence[Tensor], pad_id: int
) -> Tensor:
    """Returns logits (batch, longest response, vocabulary) of the response tokens, on the model's device.

    Queries and responses are lists of 1-d token tensors on the CPU. Shared prefixes are encoded once.
    """
    stems = read_stems(model, [tuple(query.tolist()) for query in queries], pad_id)
    if stems is not None:
        queries = [torch.tensor(rest) for rest in stems.rests]
    batch = pack(queries, responses, pad_id, device_of(model))
    mask = batch.attention_mask
    positions = batch.position_ids
    if stems is not None:
        mask = torch.cat([stems.mask, mask], 1)
        positions = (mask.cumsum(1) - 1)[:, stems.mask.shape[1] :]
    is_padded = batch.is_padded or stems is not None
    pass_mask = whole_mask(model, mask, batch.input_ids.shape[1], is_padded)
    width = batch.response_ids.shape[1]
    cache = None if stems is None else stems.cache
    return forward(model, batch.input_ids, pass_mask, positions, width, cache=cache)[0]


class Layout(NamedTuple):
    """A plan for sharing stems in one pass; widths are in tokens.

    Args:
        groups: for each group, its stem's length and the rows that share it.
        size: largest number of rows in a group.
        stem_width: length of the longest stem.
        rest_width: length of the longest row without its stem.
    """

    groups: list[tuple[int, list[int]]]
    size: int
    stem_width: int
    rest_width: int

    @property
    def length(self) -> int:
        return self.stem_width + self.size * self.rest_width


def share_prompts(model: PreTrainedModel, batch: Window) -> PassInputs | None:
    """Lays out the batch with one row per group of rows that share a stem.

        [pad stem | rest of a prompt, its response, pad | rest, response, pad | ...]

    Each of the batch's rows attends to its stem and to itself, and its positions continue the stem's. With a stem of
    `S` tokens, `n` rows of `T` further tokens take `S + n T` tokens instead of `n (S + T)`. The mask (groups, 1, L, L)
    says which positions attend to which. `PassInputs.width`, the number of positions with logits, is the whole length
    `L`, as any position may predict a token.

    Returns None if the model does not take an arbitrary mask, or if sharing saves too little work.
    """
    if model.config._attn_implementation != "sdpa" or not attends_by_positions(model):
        return None
    hidden = model.config.get_text_config().hidden_size

    def work(layout: Layout) -> int:
        return _operations(len(layout.groups), layout.length, hidden)

    best = min(_layouts(batch), key=work)
    rows, length = batch.input_ids.shape
    if work(best) > WORTHWHILE * _operations(rows, length, hidden):
        return None
    return _lay_out(batch, best)


def _operations(rows: int, length: int, hidden: int) -> int:
    """Returns the number of operations in a layer's forward pass: matrix products plus attention."""
    return rows * length * (24 * hidden**2 + 4 * hidden * length)


def _layouts(batch: Window) -> Iterator[Layout]:
    """Yields layouts that share whole prompts, then layouts that share prefixes, with groups of every possible size.

    Larger groups save tokens but lengthen the rows that attention reads.
    """
    prompts = list(dict.fromkeys(batch.prompts))
    for stems in (prompts, stems_of(prompts)):
        stem_of = dict(zip(prompts, stems, strict=True))
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(batch.prompts):
            rows_of.setdefault(stem_of[prompt], []).append(row)
        rest_width = max(
            len(batch.prompts[row]) - len(stem) + batch.response_lengths[row] - 1
            for stem, rows in rows_of.items()
            for row in rows
        )
        for size in range(1, max(map(len, rows_of.values())) + 1):
            groups = [
                (len(stem), rows[start : start + size])
                for stem, rows in rows_of.items()
                for start in range(0, len(rows), size)
            ]
            yield Layout(groups, size, max(map(len, rows_of)), rest_width)


def _lay_out(batch: Window, layout: Layout) -> PassInputs:
    """Lays out a batch; `predicting` lists the positions that predict each row's response tokens.

    Two rows with the prompt `p q` and the responses `a b c` and `d e f` become one row, with
    `predicting` [[1, 2, 3], [1, 4, 5]]:

        token       p  q    a  b  d  e      (a response's last token predicts nothing)
        part        0  0    1  1  2  2      (0 is the stem)
        predicts    -  a, d b  c  e  f

    With the prompts `p q` and `p r`, `predicting` is [[1, 2, 3], [4, 5, 6]]:

        token       p    q  a  b  r  d  e
        part        0    1  1  1  2  2  2
        predicts    -    a  b  c  d  e  f
    """
    device = batch.input_ids.device
    response_width = batch.response_ids.shape[1]
    # `input_ids` lacks the last response token, which predicts nothing.
    batch_width = batch.input_ids.shape[1]
    prompt_width = batch_width - response_width + 1
    # Each position's token as an index into the flattened batch; -1 is padding.
    source = torch.full((len(layout.groups), layout.length), -1)
    predicting = torch.empty(len(batch.prompts), response_width, dtype=torch.long)
    for number, (stem, rows) in enumerate(layout.groups):
        stem_positions = torch.arange(layout.stem_width - stem, layout.stem_width)
        for index, row in enumerate(rows):
            # Positions of the row's tokens: first in the shared stem, then behind it.
            rest_start = layout.stem_width + index * layout.rest_width
            rest_positions = torch.arange(rest_start, rest_start + layout.rest_width)
            positions = torch.cat([stem_positions, rest_positions])

            prompt_length = len(batch.prompts[row])
            num_tokens = prompt_length + batch.response_lengths[row] - 1
            first_token = row * batch_width + prompt_width - prompt_length
            source[number, positions[:num_tokens]] = first_token + torch.arange(num_tokens)

            # The token before a response token predicts it; the prompt's last token predicts the first one.
            predictors = torch.arange(prompt_length - 1, prompt_length - 1 + response_width)
            predictors = predictors.clamp(max=len(positions) - 1)  # at padding, any will do
            predicting[row] = number * layout.length + positions[predictors]

    source = to_device(source, device)
    is_token = source >= 0
    source = source.clamp(min=0)
    return PassInputs(
        batch.input_ids.flatten()[source],
        _sees(layout, device) & is_token[:, None, None],
        batch.position_ids.flatten()[source],
        layout.length,
        to_device(predicting, device),
    )


def _sees(layout: Layout, device: torch.device) -> Tensor:
    """Returns a mask (length, length), true where a position attends to another.

    Each position attends to the stem and to the rest of its own row, up to itself.
    """
    rests = torch.arange(1, layout.size + 1, device=device).repeat_interleave(layout.rest_width)
    part = torch.cat([rests.new_zeros(layout.stem_width), rests])  # the stem is part 0
    up_to_itself = torch.ones(layout.length, layout.length, dtype=torch.bool, device=device).tril()
    return up_to_itself & ((part == 0) | (part == part[:, None]))
