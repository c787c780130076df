"""The forward passes of training and evaluation: the response window, and beginnings that prompts share.

    [pad prompt | response pad]     prompt width P, response width R

Prompts are padded on the left, responses on the right. Logits and hidden states exist only at the R
positions that predict response tokens, so an observer's long prompt costs no vocabulary projection and
no memory for it.

What prompts begin with in common, their stem, is read once: a group's whole prompt, the examples of a
few-shot prompt, a system prompt. Without gradient, stems are read first and their keys and values kept
(`read_stems`). In training, rows stand behind one copy of their stem (`share_prompts`, after Prefix
Grouper, arXiv 2506.05433).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from cory.errors import UserError
from cory.parallel.devices import to_device
from cory.parallel.sharding import device_of

# Families tested with stems and with masks of all positions.
BY_POSITIONS = ("gpt2", "gpt_neox", "llama", "olmo2", "qwen2", "qwen3", "smollm3")
# The most of a plain pass's work that a pass with shared stems may take, or laying out does not pay.
WORTHWHILE = 0.9


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
    """Queries and responses (lists of 1-d token tensors, none empty) as one Window.

    `device`: where the window goes from the CPU. By default it is where the tokens are.
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
    """Those of the arguments that a model's forward pass takes."""
    names = _parameters(type(model).forward)
    return {name: value for name, value in arguments.items() if name in names or "kwargs" in names}


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
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    width: int,
    cache: DynamicCache | None = None,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits (batch, width, vocabulary) of the last `width` positions, and the hidden states that
    they come from.

    `attention_mask`: see `whole_mask`. `cache`: of what stands before `input_ids`; the mask covers
    it, too. `index`: (rows, R) of these positions, row after row; then there are logits (rows, R,
    vocabulary) of those alone.
    """
    seen: list[Tensor] = []

    def before_head(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0]
        if index is not None:
            hidden = hidden[:, -width:].flatten(0, 1)[index]
        # A slice would be projected row by row where no gradient is needed.
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
    whole = whole_mask(model, mask, batch.input_ids.shape[1], is_padded)
    width = batch.response_ids.shape[1]
    cache = None if stems is None else stems.cache
    return forward(model, batch.input_ids, whole, positions, width, cache)[0]


class PassInputs(NamedTuple):
    """What a pass over a window reads, in the order in which a policy's wrapper takes it.

    input_ids, position_ids: (batch, L). mask: see `whole_mask`. width: how many positions, the last of
    each row, may predict. predicting: (rows of the window, R), which of these, row after row, predicts
    each response token; None: all do, one after the other, and the width is R.
    """

    input_ids: Tensor
    mask: Tensor | None
    position_ids: Tensor
    width: int
    predicting: Tensor | None = None


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


def share_prompts(model: PreTrainedModel, batch: Window) -> PassInputs | None:
    """The batch with what prompts share read once: a row for each stem.

        [pad stem | rest of a prompt, its response, pad | rest, response, pad | ...]

    A row of the window sees the stem and itself, and its positions go on from the stem's. So `n` rows
    are read as `S + n T` tokens in place of `n (S + T)`. The mask (stems, 1, L, L) says which position
    sees which; the width is `L`, as any position may predict.

    None if the model cannot take an arbitrary mask, or if that would not be much less work.
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


def _lay_out(batch: Window, layout: Layout) -> PassInputs:
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
    return PassInputs(
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


def recompute_in_eval(model: nn.Module) -> list[nn.Module]:
    """Makes the layers with gradient checkpointing compute and recompute in `eval()`; returns them.

    Transformers recomputes a layer in training mode only, in which some layers drop out by themselves
    (OPT, Falcon, XGLM: `dropout(..., training=self.training)`). None has gradient checkpointing where
    it is off. Raises a UserError if the model has it in code of its own.
    """
    modules = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    layers = [m for m in modules if isinstance(m, GradientCheckpointingLayer)]
    if modules and not layers:
        raise UserError(
            "model.gradient_checkpointing: expected a model of transformers' GradientCheckpointingLayers, "
            f"got a {type(modules[0]).__name__}. Set it to false"
        )
    for layer in layers:
        layer._gradient_checkpointing_func = partial(_checkpoint, layer)
    return layers


def _checkpoint(layer: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    """`forward(*args)` of a layer in training mode, computed and recomputed in `eval()`."""

    def in_eval(*args: Any) -> Any:
        layer.training = False
        try:
            return forward(*args)
        finally:
            layer.training = True

    return checkpoint(in_eval, *args, use_reentrant=False)
