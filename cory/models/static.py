"""Sampling with a static cache: buffers of fixed shapes, in which a compiled step reads a token of each row.

The dynamic cache of `texts.py` grows with every token, and loses rows as they end. Here a text has room for the
longest response from the start, and rows leave in bucket sizes, so that few shapes occur. `torch.compile` makes one
program for each, without dynamic shapes. The buffers stay where they are from batch to batch, as CUDA graphs need.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import StaticLayer

from cory.errors import UserError
from cory.models.texts import Texts
from cory.models.window import attends_by_positions
from cory.parallel.devices import to_device

SMALLEST = 8  # rows of the smallest bucket
ROOM = 64  # the length of a cache is a multiple of this
ATTENTION = "cory_one_token"
Step = Callable[[PreTrainedModel, Tensor, Tensor, Tensor, Cache], Tensor]


def check_static(model: PreTrainedModel | PeftModel, device: torch.device) -> None:
    """Raises a UserError if a model cannot sample with a static cache, or `device` cannot compile."""
    check_family(model)
    if not _is_compiled_on(device):
        return
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
    except Exception as error:  # of a compiler, which may lack anything
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"sampling.cache: expected dynamic, as torch.compile fails here ({reason}), got static"
        ) from error


def check_family(model: PreTrainedModel | PeftModel) -> None:
    """Raises a UserError if a model does not attend as `_attend` does."""
    attention = model.config._attn_implementation
    if not attends_by_positions(model):
        reason = f"a model of type {model.config.model_type}"
    elif attention != "sdpa":
        reason = f"{attention} attention"
    else:
        return
    raise UserError(f"sampling.cache: expected dynamic with {reason}, got static")


class Bucket:
    """What the step reads and writes, with shapes and addresses that stay.

    Attributes:
        new, position: (rows, 1) a token of each row, and where it stands in its text.
        mask: (rows, 1, 1, capacity) True where the row has a token.
        slot: (1,) where in the cache the token goes, in all rows.
        cache: keys and values, (rows, heads, capacity, size) in each layer.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        keys = layers[0][0]
        rows, _, capacity, _ = keys.shape
        self.new = torch.zeros(rows, 1, dtype=torch.long, device=keys.device)
        self.position = torch.zeros_like(self.new)
        self.mask = torch.zeros(rows, 1, 1, capacity, dtype=torch.bool, device=keys.device)
        self.slot = torch.zeros(1, dtype=torch.long, device=keys.device)
        self.cache = Cache(layers=[_Layer(*layer, self.slot) for layer in layers])
        buffers = [self.new, self.position, self.mask, self.slot]
        for tensor in itertools.chain(buffers, *layers):
            torch._dynamo.mark_static_address(tensor)


class _Layer(StaticLayer):
    """Keys and values of a layer, in tensors that are given. The next token goes to `slot`."""

    def __init__(self, keys: Tensor, values: Tensor, slot: Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.keys = keys
        self.values = values
        self.slot = slot
        self.dtype = keys.dtype
        self.device = keys.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        # Autocast may leave them of another type, which the dynamic cache converts, too.
        self.keys.index_copy_(2, self.slot, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.slot, value_states.to(self.values.dtype))
        return self.keys, self.values

    def get_seq_length(self) -> Tensor:
        return self.slot[0]


class Buffers:
    """Room for the keys and values of the largest batch so far, which all buckets of a model share.

    Args:
        layers: keys and values (any, heads, any, size) of a batch, whose sizes and types are taken.
        places: rows times capacity.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], places: int) -> None:
        self.places = places
        self.layers = [
            (_room_for(places, keys), _room_for(places, values)) for keys, values in layers
        ]
        self.buckets: dict[tuple[int, int], Bucket] = {}

    def are_like(self, layers: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Whether they have the types, and the device, of these keys and values."""
        pairs = zip(itertools.chain(*self.layers), itertools.chain(*layers), strict=True)
        return all(room.dtype == x.dtype and room.device == x.device for room, x in pairs)

    def bucket(self, rows: int, capacity: int) -> Bucket:
        """The bucket of this size; what is in it is left over from others."""
        if (rows, capacity) not in self.buckets:
            layers = [
                (_shaped(keys, rows, capacity), _shaped(values, rows, capacity))
                for keys, values in self.layers
            ]
            self.buckets[rows, capacity] = Bucket(layers)
        return self.buckets[rows, capacity]


def _room_for(places: int, states: Tensor) -> Tensor:
    """(places, heads, size) zeros, of the type of `states`, (rows, heads, length, size)."""
    return states.new_zeros(places, states.shape[1], states.shape[3])


def _shaped(room: Tensor, rows: int, capacity: int) -> Tensor:
    """The first places of a room as (rows, heads, capacity, size)."""
    _, heads, size = room.shape
    return room[: rows * capacity].view(rows, heads, capacity, size)


_BUFFERS: weakref.WeakKeyDictionary[PreTrainedModel, Buffers] = weakref.WeakKeyDictionary()


def _buffers_of(
    model: PreTrainedModel, layers: Sequence[tuple[Tensor, Tensor]], places: int
) -> Buffers:
    """The model's buffers, made anew if they are too small, or of another type or device."""
    buffers = _BUFFERS.get(model)
    if buffers is None or buffers.places < places or not buffers.are_like(layers):
        buffers = _BUFFERS[model] = Buffers(layers, places)
    return buffers


class StaticTexts:
    """Does what `Texts` does, for prompts that have been read and have a row for each response.

    `ids` and `new` have the rows of the batch, in their order. They stand somewhere in a bucket of at least as many
    rows (`bucket_rows`); what the others of the bucket compute is not used.
    """

    bucket: Bucket
    bucket_rows: Tensor

    def __init__(self, texts: Texts, longest: int) -> None:
        """
        Args:
            texts: of which all has been read. longest: tokens of a response at most.
        """
        self.model = texts.model
        self.ids = texts.ids
        self.new = texts.ids[:, -1:]
        self.length = texts.mask.shape[1]  # positions in the cache that are taken
        self.capacity = -(-(self.length + longest) // ROOM) * ROOM
        layers = [(layer.keys, layer.values) for layer in texts.cache.layers]
        self.buffers = _buffers_of(self.model, layers, _bucket_size(len(self.ids)) * self.capacity)
        self._write(layers, texts.mask.bool(), texts.position[:, -1:])

    def append(self, tokens: Tensor) -> None:
        """Adds the next token of each row, (rows, 1)."""
        self.new = tokens
        self.ids = torch.cat([self.ids, tokens], 1)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices."""
        index = to_device(torch.tensor(rows), self.ids.device)
        self.ids = self.ids[index]
        self.new = self.new[index]
        self.bucket_rows = self.bucket_rows[index]
        bucket = self.bucket
        if _bucket_size(len(rows)) < len(bucket.new):
            kept, taken = self.bucket_rows, slice(self.length)
            layers = (  # copies, made one after the other: both buckets share their memory
                (layer.keys[kept, :, taken], layer.values[kept, :, taken])
                for layer in bucket.cache.layers
            )
            self._write(layers, bucket.mask[kept, 0, 0, taken], bucket.position[kept])

    def read(self) -> Tensor:
        """Reads `new`. The logits of the token after it, (rows, vocabulary)."""
        bucket = self.bucket
        bucket.new[self.bucket_rows] = self.new
        bucket.mask[..., self.length] = True
        bucket.position += 1
        bucket.slot.fill_(self.length)
        self.length += 1
        config = self.model.config
        attention = config._attn_implementation
        config._attn_implementation = ATTENTION
        try:
            run = compiled_step() if _is_compiled_on(self.ids.device) else step
            logits = run(self.model, bucket.new, bucket.mask, bucket.position, bucket.cache)
        finally:
            config._attn_implementation = attention
        return logits[self.bucket_rows]  # a copy: the next step may write where this one did

    def _write(
        self, layers: Iterable[tuple[Tensor, Tensor]], mask: Tensor, position: Tensor
    ) -> None:
        """Writes the rows into the first of the smallest bucket that they fit into."""
        rows = len(self.ids)
        self.bucket_rows = torch.arange(rows, device=self.ids.device)
        self.bucket = self.buffers.bucket(_bucket_size(rows), self.capacity)
        self.bucket.mask.zero_()
        self.bucket.mask[:rows, 0, 0, : self.length] = mask
        # Positions of the other rows start anew, too: a model may have an embedding for each.
        self.bucket.position.zero_()
        self.bucket.position[:rows] = position
        for layer, (keys, values) in zip(self.bucket.cache.layers, layers, strict=True):
            # Masked positions count nothing, but what is not a number would.
            layer.keys.zero_()
            layer.values.zero_()
            layer.keys[:rows, :, : self.length] = keys
            layer.values[:rows, :, : self.length] = values


def _bucket_size(rows: int) -> int:
    """The smallest of 8, 12, 16, 24, 32, 48, 64 and so on that has room for them.

    >>> [_bucket_size(rows) for rows in (1, 8, 9, 13, 64)]
    [8, 8, 12, 16, 64]
    """
    power = max(SMALLEST, 1 << (rows - 1).bit_length())
    between = power * 3 // 4
    return between if SMALLEST < rows <= between else power


def step(
    model: PreTrainedModel, new: Tensor, mask: Tensor, position: Tensor, cache: Cache
) -> Tensor:
    """Logits (rows, vocabulary) of what follows `new`, which goes into the cache. See `Bucket`."""
    output = model(
        new, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
    )
    return output.logits[:, -1]


@cache
def compiled_step() -> Step:
    """`step`, compiled for the shapes of each bucket when it first occurs."""
    # torch has 8 shapes of a function, and 256 in all, beyond which it would raise.
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, 4096)
    settings.accumulated_recompile_limit = max(settings.accumulated_recompile_limit, 4096)
    # With CUDA graphs, on CUDA.
    return torch.compile(step, fullgraph=True, dynamic=False, mode="reduce-overhead")


def _is_compiled_on(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda")


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of one new token. query: (rows, heads, 1, size). key, value: (rows, shared heads, capacity, size).

    Heads that share keys and values are rows of one query. transformers does the same, but not while it is compiled:
    there it copies the whole cache for each of these heads.
    """
    rows, heads, _new, size = query.shape
    packed = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    output = torch.nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, size), None


AttentionInterface.register(ATTENTION, _attend)
