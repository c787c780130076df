"""Beginnings that prompts share, read once in a pass (after Prefix Grouper, arXiv 2506.05433).

Rows whose prompts begin alike stand behind one copy of their stem: a group's whole prompt, the examples of
a few-shot prompt, a system prompt.

    [pad stem | rest of a prompt, its response, pad | rest, response, pad | ...]

A row sees the stem and itself, and its positions go on from the stem's. So `n` rows are read as `S + n T`
tokens in place of `n (S + T)`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cory.models.window import Window, attends_by_positions, stems_of
from cory.parallel.devices import to_device

# The most of a plain pass's work that a pass with shared stems may take, or laying out does not pay.
WORTHWHILE = 0.9


class SharedPrompts(NamedTuple):
    """A batch with a row for each stem, and `L` positions.

    input_ids, position_ids: (stems, L). mask: (stems, 1, L, L), which position sees which. width: L.
    predicting: (rows of the window, R), which of all these positions, row after row, predicts each response token.

    In the order in which a policy's wrapper takes them.
    """

    input_ids: Tensor
    mask: Tensor
    position_ids: Tensor
    width: int
    predicting: Tensor


class Group(NamedTuple):
    """Rows of a batch, and how many tokens their prompts begin with in common."""

    stem: int
    rows: list[int]


class Layout(NamedTuple):
    """What is read as one: groups of at most `size` rows, and the widest stem, and what else of a row, in tokens."""

    groups: list[Group]
    size: int
    stem_width: int
    rest_width: int

    @property
    def length(self) -> int:
        return self.stem_width + self.size * self.rest_width


def share_prompts(model: PreTrainedModel, batch: Window) -> SharedPrompts | None:
    """The batch with what prompts share read once; None if the model cannot take an arbitrary mask, or if
    that would not be much less work.
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
    """Of a layer's forward pass: its matrices, then its attention."""
    return rows * length * (24 * hidden**2 + 4 * hidden * length)


def _layouts(batch: Window) -> Iterator[Layout]:
    """By whole prompts and by beginnings, with each number of rows behind a stem: many attend to much."""
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
                Group(len(stem), rows[start : start + size])
                for stem, rows in rows_of.items()
                for start in range(0, len(rows), size)
            ]
            yield Layout(groups, size, max(map(len, rows_of)), rest_width)


def _lay_out(batch: Window, layout: Layout) -> SharedPrompts:
    """Two rows with the prompt `p q` and the responses `a b c` and `d e f` are read as one, which
    `predicting` says with [[1, 2, 3], [1, 4, 5]]:

        token       p  q    a  b  d  e      (a response's last token predicts nothing)
        part        0  0    1  1  2  2
        predicts    -  a, d b  c  e  f

    With the prompts `p q` and `p r` it is [[1, 2, 3], [4, 5, 6]]:

        token       p    q  a  b  r  d  e
        part        0    1  1  1  2  2  2
        predicts    -    a  b  c  d  e  f
    """
    device = batch.input_ids.device
    response_width = batch.response_ids.shape[1]
    # Without the last response token, which predicts nothing.
    batch_width = batch.input_ids.shape[1]
    prompt_width = batch_width - response_width + 1
    # Where in the batch's rows, one after the other, the token of a position stands; -1 is padding.
    source = torch.full((len(layout.groups), layout.length), -1)
    predicting = torch.empty(len(batch.prompts), response_width, dtype=torch.long)
    for number, (stem, rows) in enumerate(layout.groups):
        stem_positions = torch.arange(layout.stem_width - stem, layout.stem_width)
        for index, row in enumerate(rows):
            # Where the row's tokens stand: those of the stem, which all rows share, then its own.
            rest_start = layout.stem_width + index * layout.rest_width
            rest_positions = torch.arange(rest_start, rest_start + layout.rest_width)
            positions = torch.cat([stem_positions, rest_positions])

            prompt_length = len(batch.prompts[row])
            num_tokens = prompt_length + batch.response_lengths[row] - 1
            first_token = row * batch_width + prompt_width - prompt_length
            source[number, positions[:num_tokens]] = first_token + torch.arange(num_tokens)

            # The token before a response token predicts it: that of the first is the prompt's last.
            predictors = torch.arange(prompt_length - 1, prompt_length - 1 + response_width)
            predictors = predictors.clamp(max=len(positions) - 1)  # for padding, any will do
            predicting[row] = number * layout.length + positions[predictors]

    source = to_device(source, device)
    is_token = source >= 0
    source = source.clamp(min=0)
    return SharedPrompts(
        batch.input_ids.flatten()[source],
        _sees(layout, device) & is_token[:, None, None],
        batch.position_ids.flatten()[source],
        layout.length,
        to_device(predicting, device),
    )


def _sees(layout: Layout, device: torch.device) -> Tensor:
    """(length, length), true where a position sees another: of the stem, or of its own row's rest, up to itself."""
    rests = torch.arange(1, layout.size + 1, device=device).repeat_interleave(layout.rest_width)
    part = torch.cat([rests.new_zeros(layout.stem_width), rests])  # the stem is part 0
    up_to_itself = torch.ones(layout.length, layout.length, dtype=torch.bool, device=device).tril()
    return up_to_itself & ((part == 0) | (part == part[:, None]))
