"""The response window: a ragged batch as tensors, and a forward pass over it.

    [pad prompt | response pad]     prompt width P, response width R

Prompts are padded on the left, responses on the right. Logits and hidden states are computed only at the R positions
that predict response tokens, so an observer's long prompt needs neither a vocabulary projection nor memory for logits.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from cory.parallel.devices import to_device

# Model types tested with shared prompt prefixes and with masks over all positions.
BY_POSITIONS = ("gpt2", "gpt_neox", "llama", "olmo2", "qwen2", "qwen3", "smollm3")


class Window(NamedTuple):
    """A ragged batch as tensors. `input_ids` leaves out the last response position, which predicts nothing.

    Shapes: input_ids, attention_mask, position_ids (batch, P + R - 1); response_ids, response_mask (batch, R).
    `prompts` (token ids) and `response_lengths` are Python objects, so reading them does not wait for the device.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_ids: Tensor
    response_mask: Tensor
    prompts: list[tuple[int, ...]]
    response_lengths: list[int]

    @property
    def prompt_lengths(self) -> list[int]:
        return list(map(len, self.prompts))

    def select(self, indices: Sequence[int]) -> "Window":
        """Returns the rows at `indices`, in that order, without the padding that all of them share."""
        prompts = [self.prompts[i] for i in indices]
        response_lengths = [self.response_lengths[i] for i in indices]
        left = max(self.prompt_lengths) - max(map(len, prompts))
        right = max(self.response_lengths) - max(response_lengths)
        chosen = to_device(torch.tensor(indices), self.input_ids.device)
        texts = (chosen, slice(left, self.input_ids.shape[1] - right))
        responses = (chosen, slice(max(response_lengths)))
        return Window(
            input_ids=self.input_ids[texts],
            attention_mask=self.attention_mask[texts],
            position_ids=self.position_ids[texts],
            response_ids=self.response_ids[responses],
            response_mask=self.response_mask[responses],
            prompts=prompts,
            response_lengths=response_lengths,
        )

    @property
    def is_padded(self) -> bool:
        """Whether any row of `input_ids` has padding."""
        response_width = max(self.response_lengths) - 1
        return (
            min(self.prompt_lengths) < max(self.prompt_lengths)
            or min(self.response_lengths) < response_width
        )

    def by_length(self, size: int, indices: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Yields row indices (by default of all rows) in lists of at most `size`, grouped by similar length.

        Rows with the same prompt stay together.
        """
        indices = range(len(self.prompts)) if indices is None else indices
        longest: dict[tuple[int, ...], int] = {}  # length of each prompt's longest row
        for row in indices:
            prompt = self.prompts[row]
            length = len(prompt) + self.response_lengths[row]
            longest[prompt] = max(longest.get(prompt, 0), length)
        first_row: dict[tuple[int, ...], int] = {}
        for row, prompt in enumerate(self.prompts):
            first_row.setdefault(prompt, row)

        def sort_key(row: int) -> tuple[int, int, int]:
            prompt = self.prompts[row]
            return longest[prompt], first_row[prompt], row

        order = sorted(indices, key=sort_key)
        return (order[start : start + size] for start in range(0, len(order), size))


def pad(rows: Sequence[Tensor], pad_id: int, side: str) -> tuple[Tensor, Tensor]:
    """Pads token rows on `side`; returns ids (batch, longest) and their 0/1 mask."""
    ids = nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_value=pad_id, padding_side=side
    )
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)[:, None]
    position = torch.arange(ids.shape[1], device=ids.device)
    mask = position < lengths if side == "right" else position >= ids.shape[1] - lengths
    return ids, mask.long()


def pack(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    pad_id: int,
    device: torch.device | None = None,
) -> Window:
    """Packs queries and responses (lists of 1-d token tensors, none empty) into a Window.

    Args:
        device: device of the window; by default the tokens' device.
    """
    device = queries[0].device if device is None else device
    query_ids, query_mask = pad(queries, pad_id, "left")
    response_ids, response_mask = pad(responses, pad_id, "right")
    input_ids = torch.cat([query_ids, response_ids], 1)[:, :-1]
    attention_mask = torch.cat([query_mask, response_mask], 1)[:, :-1]
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return Window(
        input_ids=to_device(input_ids, device),
        attention_mask=to_device(attention_mask, device),
        position_ids=to_device(position_ids, device),
        response_ids=to_device(response_ids, device),
        response_mask=to_device(response_mask, device),
        prompts=[tuple(query.tolist()) for query in queries],
        response_lengths=[len(response) for response in responses],
    )


def accepted(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a model's forward pass accepts."""
    names = _parameters(type(model).forward)
    return {name: value for name, value in arguments.items() if name in names or "kwargs" in names}


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Returns the names of a function's parameters; cached, as every pass needs them."""
    return frozenset(inspect.signature(function).parameters)


def attends_by_positions(model: PreTrainedModel) -> bool:
    """Whether a model is known to support any mask over positions.

    The model must attend to all earlier tokens and take distances from `position_ids`. A sliding window, for example,
    would count padding.
    """
    if model.config.model_type not in BY_POSITIONS:
        return False
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) is DynamicLayer for layer in layers)


def whole_mask(model: PreTrainedModel, mask: Tensor, new: int, is_padded: bool) -> Tensor | None:
    """Returns the mask as transformers would make it, without asking the device whether there is padding.

    Args:
        mask: 0 at padding (batch, positions).
        new: number of positions, at the end, that the pass computes.
        is_padded: whether `mask` contains a 0.

    Returns a mask (batch, 1, new, positions), or None if nothing is padded and a pass is faster without a mask. For
    models that make their own masks, returns `mask`.
    """
    if not attends_by_positions(model) or model.config._attn_implementation != "sdpa":
        return mask
    if not is_padded and not attends_slowly_without_mask(model, mask.device):
        return None
    positions = mask.shape[1]
    causal = torch.ones(new, positions, dtype=torch.bool, device=mask.device)
    return causal.tril(positions - new) & mask.bool()[:, None, None]


def attends_slowly_without_mask(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether a pass without a mask would use torch's plain attention kernel, which stores all scores.

    Without a mask, transformers leaves grouped-query attention to torch, and torch has no faster kernel for it in
    float32 on NVIDIA GPUs.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    is_grouped = getattr(config, "num_key_value_heads", None) not in (None, heads)
    is_float32 = model.dtype == torch.float32 and not torch.is_autocast_enabled(device.type)
    return device.type == "cuda" and is_grouped and is_float32


def forward(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    width: int,
    index: Tensor | None = None,
    cache: DynamicCache | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns logits (batch, width, vocabulary) of the last `width` positions, and the output layer's inputs.

    Args:
        attention_mask: see `whole_mask`; it covers the cache, too.
        index: indices (rows, R) into the flattened last `width` positions. If given, both results cover only these
            positions, as (rows, R, ...).
        cache: keys and values of the tokens before `input_ids`.
    """
    seen: list[Tensor] = []

    def before_head(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0]
        if index is not None:
            hidden = hidden[:, -width:].flatten(0, 1)[index]
        # Made contiguous, because without gradient a slice would be projected row by row.
        seen.append(hidden.contiguous())
        return (seen[-1], *args[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(before_head)  # type: ignore[operator]
    options = accepted(model, {"position_ids": position_ids, "logits_to_keep": width})
    options["use_cache"] = cache is not None
    if cache is not None:
        options["past_key_values"] = cache
    try:
        logits = model(input_ids=input_ids, attention_mask=attention_mask, **options).logits
    finally:
        hook.remove()
    if index is not None:
        return logits, seen[-1]
    # Models without logits_to_keep project every position. The results of others are not sliced, because even a full
    # slice costs time.
    logits, hidden = (x if x.shape[1] == width else x[:, -width:] for x in (logits, seen[-1]))
    return logits, hidden


class PassInputs(NamedTuple):
    """Inputs of a pass over a window, in the order of `forward`'s parameters.

    Args:
        input_ids, position_ids: (batch, L).
        mask: see `whole_mask`.
        width: number of positions, at the end of each row, that may predict a response token.
        predicting: for each response token (rows of the window, R), the index of the position that predicts it, among
            the flattened positions. If None, the last R positions of each row predict the response in order.
    """

    input_ids: Tensor
    mask: Tensor | None
    position_ids: Tensor
    width: int
    predicting: Tensor | None = None


class WindowPolicy(nn.Module):
    """A policy without value head, evaluated in the response window."""

    def __init__(self, pretrained_model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model

    def forward(self, *inputs: Any) -> tuple[Tensor, None]:
        """Returns float32 logits (rows, R, vocabulary); takes the fields of `PassInputs`."""
        logits, _ = forward(self.pretrained_model, *inputs)
        return logits.float(), None
