"""A simulated accelerator that finds device mistakes without a GPU. The tensors of its device `sim` wrap CPU tensors.

`install()` registers the device permanently in this process. Programs then run on it as on CUDA. An operation that
mixes tensors from two devices raises an error with the operation's name; CPU scalars and CPU indices are allowed, as
on CUDA. The CPU computes all results, so a run on `sim` must equal the run on the CPU.

A real backend would provide the following, which this file patches in:

* accelerate's default device, and the device names that settings accept
* `tolist` and access to the storage, which torch refuses for subclasses of Tensor
* attention's causal mask on the device
* moving modules by swapping their parameters, so that tied weights stay tied
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate import PartialState
from torch.utils import backend_registration

from cory.parallel import devices

# Operations that accept CPU indices.
INDEXING = ("index.Tensor", "index_put_", "index_put", "_index_put_impl_")


class SimTensor(torch.Tensor):
    """A tensor on the device `sim`; `raw` is the CPU tensor with its values."""

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # __torch_dispatch__ is enough

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> SimTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), raw.stride(), raw.storage_offset(), dtype=raw.dtype,
            device=torch.device("sim", 0),
        )  # fmt: skip
        tensor.raw = raw
        return tensor

    def __repr__(self) -> str:
        return f"sim {self.raw}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


def compute(operation, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs the operation on the wrapped CPU tensors and wraps new results."""
    inputs = list(_flat((*args, *kwargs.values())))
    wanted = next((x for x in inputs if isinstance(x, torch.device)), None)
    simulated = [x for x in inputs if isinstance(x, SimTensor)]
    if simulated and not operation.__name__.startswith(("copy_", "_to_copy", "to.")):
        _check_devices(operation, inputs)

    raw_kwargs = {key: _mapped(_unwrapped, value) for key, value in kwargs.items()}
    result = operation(*_mapped(_unwrapped, args), **raw_kwargs)

    wrapper = {id(x.raw): x for x in simulated}  # an in-place operation returns its argument
    is_on_device = wanted.type == "sim" if wanted is not None else bool(simulated)

    def wrapped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not is_on_device:
            return x
        return wrapper[id(x)] if id(x) in wrapper else SimTensor(x)

    return _mapped(wrapped, result)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yields the values, with nested lists and tuples flattened."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """Applies the function to `x`, or to each element of a list or tuple."""
    if isinstance(x, (list, tuple)):
        return type(x)([_mapped(function, element) for element in x])
    return function(x)


def _unwrapped(x: Any) -> Any:
    if isinstance(x, SimTensor):
        return x.raw
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _check_devices(operation, inputs: list[Any]) -> None:
    """Raises unless all tensors are on `sim`. CPU scalars and CPU indices are allowed, as on CUDA."""
    others = [x for x in inputs if isinstance(x, torch.Tensor) and not isinstance(x, SimTensor)]
    strangers = [x for x in others if x.dim() > 0]
    if str(operation).removeprefix("aten.") in INDEXING or operation.__name__ in INDEXING:
        strangers = [x for x in strangers if x.dtype.is_floating_point]
    if strangers:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {operation} got some on cpu and some on sim"
        )


class SimModule:
    """The module `torch.sim`, which torch expects of every backend."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        """Does nothing, as the device has no global generator."""

    def empty_cache(self) -> None:
        """Does nothing, as no memory is cached."""


def install() -> None:
    """Registers the device and applies the patches."""
    devices.NAMES = r"cpu|sim:0"
    backend_registration._setup_privateuseone_for_python_backend("sim", SimModule())
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[method-assign]
    # Kept as an attribute, since the registration ends when nothing refers to the library any more.
    install.library = torch.library.Library("aten", "IMPL")
    install.library.impl("empty.memory_format", _empty, "PrivateUse1")
    install.library.impl("empty_strided", _empty_strided, "PrivateUse1")
    install.library.impl("_copy_from", _copy_from, "PrivateUse1")
    torch.nn.functional.scaled_dot_product_attention = _with_a_mask(
        torch.nn.functional.scaled_dot_product_attention
    )
    PartialState.default_device = property(lambda state: _default)


def _with_a_mask(attention):
    """Wraps attention so that its causal mask is on the query's device."""

    def run(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        if is_causal:
            length = query.shape[-2]
            attn_mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        return attention(query, key, value, attn_mask, dropout_p, **options)

    return run


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return SimTensor(torch.empty(size, dtype=dtype, memory_format=memory_format))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return SimTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source, into, non_blocking=False):
    _unwrapped(into).copy_(_unwrapped(source))
    return into


_default = torch.device("cpu")


def use(device: str) -> None:
    """Makes this device accelerate's default."""
    global _default
    _default = torch.device(device)
