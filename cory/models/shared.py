"""Prompts that several rows share, read once in a pass (Prefix Grouper, arXiv 2506.05433).

The responses to a prompt stand behind one copy of it:

    [pad prompt | response pad | response pad | ...]

A response sees the prompt and itself, and its positions go on from the prompt's. So a pass reads
`P + G (R - 1)` tokens in place of `G (P + R - 1)`.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cory.models.window import Window, attends_by_positions
from cory.parallel.devices import to_device

# The most of a plain pass's work that a pass with shared prompts may take, or laying out does not
# pay.
WORTHWHILE = 0.9


class SharedPrompts(NamedTuple):
    """A batch with a row for each different prompt, and `L` positions.

    input_ids, position_ids: (prompts, L). mask: (prompts, 1, L, L), which position sees which.
    width: how many of the positions, at the end, predict response tokens. predicting: (rows of the
    window, R), which of these, row after row, predicts each response token.

    In the order in which a policy's wrapper takes them.
    """

    input_ids: Tensor
    mask: Tensor
    position_ids: Tensor
    width: int
    predicting: Tensor


def share_prompts(model: PreTrainedModel, batch: Window) -> SharedPrompts | None:
    """The batch with each prompt once; None if the model cannot take an arbitrary mask, or if
    that would not be much less work.
    """
    if model.config._attn_implementation != "sdpa" or not attends_by_positions(model):
        return None
    members: dict[int, list[int]] = {}
    for row, prompt in enumerate(batch.prompt_index):
        members.setdefault(prompt, []).append(row)
    size = max(map(len, members.values()))
    later = batch.response_ids.shape[1] - 1  # response tokens that predict another
    prompt_width = batch.input_ids.shape[1] - later
    length = prompt_width + size * later
    hidden = model.config.get_text_config().hidden_size
    shared = _operations(len(members), length, hidden)
    if shared > WORTHWHILE * _operations(len(batch.input_ids), prompt_width + later, hidden):
        return None
    return _lay_out(batch, list(members.values()), size, prompt_width)


def _operations(rows: int, length: int, hidden: int) -> int:
    """Of a layer's forward pass: its matrices, then its attention."""
    return rows * length * (24 * hidden**2 + 4 * hidden * length)


def _lay_out(batch: Window, groups: list[list[int]], size: int, prompt_width: int) -> SharedPrompts:
    """`groups`: the rows that share a prompt, at most `size` each.

    Two rows with the prompt `p q` and the responses `a b c` and `d e f` are read as one. Of its
    last 5 positions, `predicting` has [[0, 1, 2], [0, 3, 4]]:

        token       p  q    a  b  d  e      (a response's last token predicts nothing)
        part        0  0    1  1  2  2
        predicts    -  a, d b  c  e  f
    """
    device = batch.input_ids.device
    later = batch.input_ids.shape[1] - prompt_width
    # Smaller groups are filled up with their first row, which is masked there.
    filled = [[*rows, *[rows[0]] * (size - len(rows))] for rows in groups]
    is_member = [[place < len(rows) for place in range(size)] for rows in groups]
    rows = to_device(torch.tensor(filled), device)
    members = to_device(torch.tensor(is_member), device)

    def laid_out(x: Tensor) -> Tensor:
        return torch.cat([x[rows[:, 0], :prompt_width], x[rows, prompt_width:].flatten(1)], 1)

    is_token = laid_out(batch.attention_mask).bool()
    is_token[:, prompt_width:] &= members.repeat_interleave(later, 1)
    # The prompt is part 0, each response one of its own.
    parts = torch.arange(1, size + 1, device=device).repeat_interleave(later)
    parts = torch.cat([torch.zeros(prompt_width, dtype=parts.dtype, device=device), parts])
    length = len(parts)
    sees = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    sees &= (parts == 0) | (parts == parts[:, None])

    width = 1 + size * later
    index = torch.empty(len(batch.prompt_index), later + 1, dtype=torch.long)
    for number, group in enumerate(groups):
        for place, row in enumerate(group):
            first = number * width
            index[row, 0] = first  # the prompt's last token predicts every response's first
            index[row, 1:] = first + 1 + place * later + torch.arange(later)
    return SharedPrompts(
        laid_out(batch.input_ids),
        sees & is_token[:, None, None],
        laid_out(batch.position_ids),
        width,
        to_device(index, device),
    )
