"""A simulated accelerator: devices `sim:0` and `sim:1` whose tensors hold CPU tensors. They find
device mistakes without a GPU.

`install()` registers them in this process, for good. A program then runs on them as on CUDA: an
operation on tensors of two devices raises, with the operation's name; a CPU scalar and indices on
the CPU pass, as they do there. Results are the CPU's, so a run must equal that on the CPU.

`counted()` counts what the program would wait for, and what it would send.

The shims, which a real backend brings by itself:

* generators of a device: a CPU generator that knows its device, so that both draw the same numbers
* autocast: linear layers and matrix products take bfloat16 inputs
* accelerate's choice of a device
* `tolist` and what is asked of a storage, which torch refuses for subclasses of Tensor
* the causal mask of attention is made here, as torch would make it on the one device that it knows
* modules are moved by swapping their parameters, so that tied weights stay tied
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.utils import backend_registration

ROOT = Path(__file__).resolve().parents[2]
# Operations whose result is a size or a number that Python reads: CUDA waits for it.
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "unique",
    "repeat_interleave.Tensor",
)
# Operations that take indices on the CPU.
INDEXING = ("index.Tensor", "index_put_", "index_put", "_index_put_impl_")
counts: Counter[str] = Counter()  # by kind and place


class SimTensor(torch.Tensor):
    """A tensor of a device `sim:N`; `raw` is the CPU tensor with its numbers.

    torch counts one device of a Python backend (`PythonDeviceGuard::deviceCount`), and autograd has
    a thread for that one. So torch's own code takes every tensor for one of `sim:0`. `index` is
    that of the device which the program sees, and which operations compare.
    """

    raw: torch.Tensor
    index: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # __torch_dispatch__ is enough

    @staticmethod
    def __new__(cls, raw: torch.Tensor, index: int) -> SimTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), raw.stride(), raw.storage_offset(), dtype=raw.dtype,
            device=torch.device("sim", 0),
        )  # fmt: skip
        tensor.raw = raw
        tensor.index = index
        return tensor

    @property
    def device(self) -> torch.device:
        return torch.device("sim", self.index)

    def __repr__(self) -> str:
        return f"{self.device} {self.raw}"

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Where torch sees no difference, the copy to the other device is made here."""
        without_copy = {key: value for key, value in kwargs.items() if key != "copy"}
        device = torch._C._nn._parse_to(*args, **without_copy)[0]
        if device is None or device.type != "sim" or (device.index or 0) == self.index:
            return super().to(*args, **kwargs)
        return torch.ops.aten._to_copy(self, device=device).to(*args, **kwargs)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        raise RuntimeError("only tensors of the CPU can be pinned")

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


def compute(operation, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs the operation on the CPU tensors inside, and wraps what is new."""
    name = operation.__name__
    inputs = list(_flat((*args, *kwargs.values())))
    wanted = next((x for x in inputs if isinstance(x, torch.device)), None)
    indices = {x.index for x in inputs if isinstance(x, SimTensor)}
    index = max(indices, default=0)
    is_copy = name.startswith(("copy_", "_to_copy", "to."))
    if is_copy and wanted is not None and wanted.type == "sim":
        index = wanted.index or 0
    if not is_copy:
        _check_devices(operation, inputs, indices)
    _count(name, args, inputs, wanted)

    raw_kwargs = {key: _mapped(_unwrapped, value) for key, value in kwargs.items()}
    result = operation(*_mapped(_unwrapped, args), **raw_kwargs)

    # An operation in place returns the tensor that it got.
    wrapper = {id(x.raw): x for x in inputs if isinstance(x, SimTensor)}
    stays = (wanted is not None and wanted.type != "sim") or (not indices and wanted is None)

    def wrapped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or stays:
            return x
        return wrapper[id(x)] if id(x) in wrapper else SimTensor(x, index)

    return _mapped(wrapped, result)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """The values, and the elements of lists and tuples among them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """What the function gives for `x`, or for the elements of a list or tuple."""
    if isinstance(x, (list, tuple)):
        return type(x)([_mapped(function, element) for element in x])
    return function(x)


def _unwrapped(x: Any) -> Any:
    if isinstance(x, SimTensor):
        return x.raw
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _check_devices(operation, inputs: list[Any], indices: set[int]) -> None:
    """As CUDA does: all tensors on one device, but for scalars, and indices on the CPU."""
    others = [x for x in inputs if isinstance(x, torch.Tensor) and not isinstance(x, SimTensor)]
    strangers = [x for x in others if x.dim() > 0]
    if str(operation).removeprefix("aten.") in INDEXING or operation.__name__ in INDEXING:
        strangers = [x for x in strangers if x.dtype.is_floating_point]
    # torch makes scalars of its own, of the device that it knows.
    of_arrays = {x.index for x in inputs if isinstance(x, SimTensor) and x.dim() > 0}
    if len(of_arrays) > 1 or (indices and strangers):
        devices = sorted({str(x.device) for x in inputs if isinstance(x, torch.Tensor)})
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {operation} got {devices}"
        )
    for generator in (x for x in inputs if isinstance(x, SimGenerator)):
        if indices and generator.simulated not in {torch.device("sim", i) for i in indices}:
            raise RuntimeError(
                f"Expected a generator on sim, but {operation} got {generator.device}"
            )


def _count(name: str, args: tuple, inputs: list[Any], wanted: torch.device | None) -> None:
    """Counts copies between devices, and what a program would wait for."""
    kind = None
    if name.startswith("copy_"):
        into, source = args[0], args[1]
        if source.numel() == 0:
            return
        if isinstance(into, SimTensor) and not isinstance(source, SimTensor):
            # Memory that is not page-locked is read before the program goes on.
            does_not_wait = any(x is True for x in args[2:])
            kind = "to the device" if does_not_wait else "wait"
        elif isinstance(source, SimTensor) and not isinstance(into, SimTensor):
            kind = "wait"
    elif name.startswith(("_to_copy", "to.")):
        if wanted is not None and wanted.type != "sim":
            kind = "wait"
    elif name.startswith(WAITING):
        kind = "wait"
    elif name in ("index.Tensor", "index_put_", "index_put"):
        masks = [x for x in inputs if isinstance(x, SimTensor) and x.dtype == torch.bool]
        if masks and masks[-1] is not inputs[0]:
            kind = "wait"  # a mask's size is not known before it is read
        elif any(isinstance(x, torch.Tensor) and not isinstance(x, SimTensor) for x in inputs):
            kind = "wait"
    if kind is not None:
        counts[f"{kind} {name} {place()}"] += 1


def place() -> str:
    """The innermost line of the project that is being run, as FILE:LINE FUNCTION."""
    frame = sys._getframe()
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and ".venv" not in file.parts and file.parent.name != "sim":
            return f"{file.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """What is counted in this context, by kind, operation and line."""
    counts.clear()
    yield counts


class SimGenerator(torch.Generator):
    """A generator of the device `sim`, or of another one. It draws the CPU's numbers."""

    def __new__(cls, device: torch.device | str = "cpu") -> SimGenerator:
        wanted = torch.device(device)
        is_simulated = wanted.type == "sim"
        generator = super().__new__(cls, "cpu" if is_simulated else wanted)
        generator.simulated = torch.device("sim", wanted.index or 0) if is_simulated else None
        return generator

    @property
    def device(self) -> torch.device:
        return self.simulated or super().device


class SimModule:
    """What `torch.sim` is."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 2

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Generators are made for their purpose; none is global."""

    def empty_cache(self) -> None:
        """No memory is kept."""


def install() -> None:
    """Registers the device, with the shims."""
    backend_registration._setup_privateuseone_for_python_backend("sim", SimModule())
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.Generator = SimGenerator  # type: ignore[misc]
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[method-assign]
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    autocast = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in ("linear", "matmul", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention"):
        autocast.impl(name, _in_bfloat16(getattr(torch.ops.aten, name)))
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    torch.nn.functional.scaled_dot_product_attention = _with_a_mask(
        torch.nn.functional.scaled_dot_product_attention
    )
    install.libraries = [library, autocast, fallback]  # they end with the last reference
    PartialState.default_device = property(lambda state: _default)


def _with_a_mask(attention):
    """Attention whose causal mask is on the device of its query."""

    def run(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        if is_causal:
            length = query.shape[-2]
            attn_mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        return attention(query, key, value, attn_mask, dropout_p, **options)

    return run


def _in_bfloat16(operation):
    """An operation under autocast: its float32 tensors of the device are read as bfloat16."""

    def lower(x: Any) -> Any:
        is_wide = isinstance(x, SimTensor) and x.dtype == torch.float32
        return x.to(torch.bfloat16) if is_wide else x

    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        ):
            return operation(*_mapped(lower, args), **{k: lower(x) for k, x in kwargs.items()})

    return run


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    raw = torch.empty(size, dtype=dtype, memory_format=memory_format)
    return SimTensor(raw, device.index or 0)


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return SimTensor(torch.empty_strided(size, stride, dtype=dtype), device.index or 0)


def _copy_from(source, into, non_blocking=False):
    raw = source.raw if isinstance(source, SimTensor) else source
    (into.raw if isinstance(into, SimTensor) else into).copy_(raw)
    _count("copy_", (into, source, non_blocking), [], None)
    return into


_default = torch.device("cpu")


def use(device: str) -> None:
    """Makes accelerate take this device for the one of the machine."""
    global _default
    _default = torch.device(device)
