"""The response window: prompts padded on the left, responses on the right, and a forward pass that
stops there.

    [pad prompt | response pad]     prompt width P, response width R

Logits and hidden states exist only at the R positions that predict response tokens, so an
observer's long prompt costs no vocabulary projection and no memory for it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from cory.parallel.devices import to_device
from cory.parallel.sharding import device_of

# Families tested with stems and with masks of all positions.
BY_POSITIONS = ("gpt2", "gpt_neox", "llama", "olmo2", "qwen2", "qwen3", "smollm3")


class Window(NamedTuple):
    """A ragged batch as tensors. `input_ids` leaves out the last response position, which predicts
    nothing.

    Shapes: input_ids, attention_mask, position_ids (batch, P + R - 1); response_ids, response_mask
    (batch, R). `prompts`, as tokens, and the lengths of responses are Python's, so that reading them
    does not wait for the device.
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
        """The rows of these indices, in that order, without padding that all of them share."""
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
        """Whether a row of `input_ids` has padding."""
        response_width = max(self.response_lengths) - 1
        return (
            min(self.prompt_lengths) < max(self.prompt_lengths)
            or min(self.response_lengths) < response_width
        )

    def by_length(self, size: int, indices: Sequence[int] | None = None) -> Iterator[list[int]]:
        """The indices (of all rows by default) in lists of at most `size`, of rows of similar length.

        Rows with the same prompt stand together.
        """
        indices = range(len(self.prompts)) if indices is None else indices
        longest: dict[tuple[int, ...], int] = {}  # row of each prompt
        for row in indices:
            prompt = self.prompts[row]
            length = len(prompt) + self.response_lengths[row]
            longest[prompt] = max(longest.get(prompt, 0), length)
        first_row: dict[tuple[int, ...], int] = {}
        for row, prompt in enumerate(self.prompts):
            first_row.setdefault(prompt, row)

        def place(row: int) -> tuple[int, int, int]:
            prompt = self.prompts[row]
            return longest[prompt], first_row[prompt], row

        order = sorted(indices, key=place)
        return (order[start : start + size] for start in range(0, len(order), size))


def pad(rows: Sequence[Tensor], pad_id: int, side: str) -> tuple[Tensor, Tensor]:
    """Token rows of different lengths as (batch, longest) ids and their 0/1 mask, padded on `side`."""
    ids = torch.nn.utils.rnn.pad_sequence(
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
    """Queries and responses (lists of 1-d token tensors, none empty) as one Window.

    `device`: where the window goes from the CPU. By default it is where the tokens are.
    """
    query_ids, query_mask = pad(queries, pad_id, "left")
    response_ids, response_mask = pad(responses, pad_id, "right")
    input_ids = torch.cat([query_ids, response_ids], 1)[:, :-1]
    attention_mask = torch.cat([query_mask, response_mask], 1)[:, :-1]
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)

    def placed(tensor: Tensor) -> Tensor:
        return tensor if device is None else to_device(tensor, device)

    return Window(
        input_ids=placed(input_ids),
        attention_mask=placed(attention_mask),
        position_ids=placed(position_ids),
        response_ids=placed(response_ids),
        response_mask=placed(response_mask),
        prompts=[tuple(query.tolist()) for query in queries],
        response_lengths=[len(response) for response in responses],
    )


def accepts(model: torch.nn.Module, argument: str) -> bool:
    """Whether a model's forward pass takes this argument."""
    # One that is put on the model itself is asked anew, as a cache would keep the model alive.
    function = getattr(model.forward, "__func__", None)
    names = _parameters(function) if function else inspect.signature(model.forward).parameters
    return argument in names or "kwargs" in names


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters; asked at every pass."""
    return frozenset(inspect.signature(function).parameters)


def attends_by_positions(model: PreTrainedModel) -> bool:
    """Whether a model is known to attend to all that stands before a token, and to find distances
    by `position_ids`, so that any mask of positions is right.

    Sliding windows, for example, count padding.
    """
    if model.config.model_type not in BY_POSITIONS:
        return False
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) is DynamicLayer for layer in layers)


def whole_mask(model: PreTrainedModel, mask: Tensor, new: int, is_padded: bool) -> Tensor | None:
    """The mask as transformers would make it, which would first ask the device whether there is
    padding, and wait for the answer.

    Args:
        mask: (batch, positions), 0 at padding. new: how many of the positions, at the end, a pass
            reads. is_padded: whether there is a 0.

    Returns (batch, 1, new, positions), or None where nothing is padded and a pass is faster without;
    for models with masks of their own `mask`.
    """
    if not attends_by_positions(model) or model.config._attn_implementation != "sdpa":
        return mask
    if not is_padded and not attends_slowly_without_mask(model, mask.device):
        return None
    positions = mask.shape[1]
    causal = torch.ones(new, positions, dtype=torch.bool, device=mask.device)
    return causal.tril(positions - new) & mask.bool()[:, None, None]


def attends_slowly_without_mask(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether `model` on `device` would attend by torch's plain kernel, which holds all scores, if it got no mask.

    Transformers then leaves it to torch that several heads share keys and values, and of torch's
    faster kernels on NVIDIA GPUs none does this in float32.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    is_grouped = getattr(config, "num_key_value_heads", None) not in (None, heads)
    is_float32 = model.dtype == torch.float32 and not torch.is_autocast_enabled(device.type)
    return device.type == "cuda" and is_grouped and is_float32


def forward(
    model: torch.nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    width: int,
    cache: DynamicCache | None = None,
    index: Tensor | None = None,
    run_head: bool = True,
) -> tuple[Tensor, Tensor]:
    """Logits (batch, width, vocabulary) of the last `width` positions, and the hidden states that
    they come from.

    `attention_mask`: see `whole_mask`. `cache`: of what stands before `input_ids`; the mask covers
    it, too. `index`: (rows, R) of these positions, row after row; then there are logits (rows, R,
    vocabulary) of those alone. `run_head`: False for the hidden states alone; the logits are then
    of one position of one row.
    """
    seen: list[Tensor] = []

    def before_head(module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0]
        if index is not None:
            hidden = hidden[:, -width:].flatten(0, 1)[index]
        # A slice would be projected row by row where no gradient is needed.
        seen.append(hidden.contiguous())
        return (seen[-1] if run_head else seen[-1][:1, -1:], *args[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(before_head)  # type: ignore[operator]
    options = {"position_ids": position_ids, "logits_to_keep": width}
    options = {name: value for name, value in options.items() if accepts(model, name)}
    reading = (
        {"use_cache": False} if cache is None else {"use_cache": True, "past_key_values": cache}
    )
    try:
        logits = model(
            input_ids=input_ids, attention_mask=attention_mask, **reading, **options
        ).logits
    finally:
        hook.remove()
    if index is not None:
        return logits, seen[-1]
    # A model that does not take logits_to_keep projects every position. (A slice of everything is
    # not free either.)
    logits, hidden = (x if x.shape[1] == width else x[:, -width:] for x in (logits, seen[-1]))
    return logits, hidden


def stems_of(prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What each prompt begins with, in such groups that few tokens are read if a group's beginning
    is read once.

    Prompts are taken in the order of their tokens. One joins those before it if that saves a
    quarter of its tokens. Its last token is left, to predict the first of the response.

    >>> stems_of([(1, 2, 3, 4, 5), (7, 8, 9), (1, 2, 3, 6, 5)])
    [(1, 2, 3), (7, 8), (1, 2, 3)]
    """
    groups: list[tuple[tuple[int, ...], list[int]]] = []  # the beginning, and the prompts
    for i in sorted(range(len(prompts)), key=lambda i: prompts[i]):
        prompt = prompts[i][:-1]
        stem, members = groups[-1] if groups else ((), [])
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(stem, prompt, strict=False))
        common = prompt[: len(list(pairs))]
        # The members would have to read again what the stem loses.
        saved = len(common) - (len(stem) - len(common)) * (len(members) - 1)
        if saved > len(prompt) / 4:
            groups[-1] = (common, [*members, i])
        else:
            groups.append((prompt, [i]))
    return [stem for _, stem in sorted((i, stem) for stem, members in groups for i in members)]


class KeysAndValues(DynamicCache):
    """A cache that holds keys in the type of the values: with autocast that in which attention reads both.

    Rotary positions leave keys in float32 there. A token's pass would round those of all tokens before it.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys = key_states.to(value_states.dtype)
        return super().update(keys, value_states, layer_idx, *args, **kwargs)


class Stems(NamedTuple):
    """What prompts begin with, read: the cache and its mask, with a row for each prompt, and what is left of each."""

    cache: DynamicCache
    mask: Tensor
    rests: list[tuple[int, ...]]


def read_stems(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], pad_id: int
) -> Stems | None:
    """Reads the common beginnings of prompts once, or None if that saves less than a fifth of their
    tokens.

    Also None for models that would count the padding between beginnings and rests.
    """
    if not attends_by_positions(model):
        return None
    stems = stems_of(prompts)
    device = device_of(model)
    rows = {stem: row for row, stem in enumerate(dict.fromkeys(stems))}
    saved = sum(map(len, stems)) - sum(map(len, rows))
    if () in rows or saved < sum(map(len, prompts)) / 5:  # two passes must pay
        return None
    padded = pad([torch.tensor(stem) for stem in rows], pad_id, "left")
    ids, mask = (to_device(tensor, device) for tensor in padded)
    cache = KeysAndValues(config=model.config)
    is_padded = len(set(map(len, rows))) > 1
    whole = whole_mask(model, mask, ids.shape[1], is_padded)
    forward(model, ids, whole, (mask.cumsum(1) - 1).clamp(min=0), 1, cache)
    copies = to_device(torch.tensor([rows[stem] for stem in stems]), device)
    cache.batch_select_indices(copies)
    return Stems(
        cache, mask[copies], [p[len(stem) :] for p, stem in zip(prompts, stems, strict=True)]
    )


def response_logits(
    model: PreTrainedModel, queries: Sequence[Tensor], responses: Sequence[Tensor], pad_id: int
) -> Tensor:
    """Logits (batch, longest response, vocabulary) at the tokens of the responses, on the model's
    device.

    Queries and responses are lists of 1-d token tensors on the CPU. Common beginnings are read
    once.
    """
    device = device_of(model)
    stems = read_stems(model, [tuple(query.tolist()) for query in queries], pad_id)
    if stems is None:
        packed = pack(queries, responses, pad_id, device)
        whole = whole_mask(
            model, packed.attention_mask, packed.input_ids.shape[1], packed.is_padded
        )
        return forward(
            model, packed.input_ids, whole, packed.position_ids, packed.response_ids.shape[1]
        )[0]
    rests = [torch.tensor(rest) for rest in stems.rests]
    packed = pack(rests, responses, pad_id, device)
    mask = torch.cat([stems.mask, packed.attention_mask], 1)
    positions = (mask.cumsum(1) - 1)[:, stems.mask.shape[1] :]
    whole = whole_mask(model, mask, packed.input_ids.shape[1], is_padded=True)
    return forward(
        model, packed.input_ids, whole, positions, packed.response_ids.shape[1], stems.cache
    )[0]
