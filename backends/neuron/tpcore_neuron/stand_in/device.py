"""The device ``neuron`` on a CPU: tensors that say they are there, whose operators run on the host's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from tpcore.backend.interface import ProgramInfo
from tpcore.private import make_wrapper, no_torch_function, schema_of, set_lazy
from tpcore.settings import LOCAL_RANK

from .limits import REMEDIES, Refusals
from .module import AskedModule, stand_for_package
from .private import compiled_now, has_no_memory, make_device, tree_leaves, tree_map

NAME = "neuron"
_CPU, _ATEN = torch.device("cpu"), torch.ops.aten
_MIXED = (_ATEN._to_copy, _ATEN.copy_, _ATEN.index, _ATEN.index_put_, _ATEN.index_put, _ATEN._index_put_impl_)
"""Operators that take tensors of two devices."""


class DeviceTensor(Tensor):
    """A tensor on the device; ``raw`` is its memory. torch counts one device of this kind, so its index is 0."""

    raw: Tensor
    tpcore_plain = True  # for checkpoints: it is all there, on its device
    __torch_function__: Any = no_torch_function

    @staticmethod
    def __new__(cls: Any, raw: Tensor) -> DeviceTensor:
        view = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        with torch.inference_mode(raw.is_inference()):  # views of other tensors are none of that mode
            self: DeviceTensor = make_wrapper(cls, raw.shape, **view, device=f"{NAME}:0")
        set_lazy(self, raw.is_conj(), raw.is_neg())  # before torch computes on it, it asks for the numbers themselves
        self.raw = raw
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.raw!r} on {NAME}"

    def __format__(self, form: str) -> str:
        return format(self.raw, form)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.raw.detach().__reduce_ex__(protocol)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.raw = raw(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = new = DeviceTensor(self.raw.clone()).requires_grad_(self.requires_grad)
        vars(new).update({name: deepcopy(value, memo) for name, value in vars(self).items() if name != "raw"})
        return new

    def tolist(self) -> Any:
        return self.raw.tolist()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        # the compiler asks for the wrapper's own, which no other tensor has
        return super().untyped_storage() if _compiles() else self.raw.untyped_storage()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> DeviceTensor:
        return DeviceTensor(inner["raw"])

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _device.run(operator, args, kwargs or {})


def _compiles() -> bool:
    """Whether torch.compile makes a graph now, of tensors without values."""
    return compiled_now() is not None


class _Restored(torch.UntypedStorage):
    """Memory of which torch.load makes tensors on the device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(NAME)


def _restored(storage: Any, location: str) -> Any:
    if location.partition(":")[0] == NAME and _device._own(torch.device(location)):
        storage.__class__ = _Restored
        return storage
    return None  # others of torch's look


def raw(x: Any) -> Any:
    """The memory of a tensor on the device; anything else as it is."""
    return x.raw if isinstance(x, DeviceTensor) else x


def _placed(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    if x.layout is not torch.strided:
        raise NotImplementedError(f"{NAME} (stand-in) has no tensors of the layout {x.layout}")
    x = x.clone() if has_no_memory(x) else x  # forward mode's zeros have no memory
    return DeviceTensor(x)


def _resized(x: DeviceTensor, memory: Tensor) -> DeviceTensor:
    """``x`` with the sizes that an operator has given to its ``memory``."""
    if not _compiles() and (x.shape, x.stride()) != (memory.shape, memory.stride()):
        x.data = DeviceTensor(memory)
    return x


def _wrapped(x: Any) -> Any:
    """A tensor of the device that the compiler has made itself, without values and without asking the device."""
    own = isinstance(x, Tensor) and not isinstance(x, DeviceTensor) and x.device.type == NAME
    return DeviceTensor(x.to(_CPU)) if own else x


def _not_registered(operator: Any, *args: Any) -> Tensor:
    raise RuntimeError(f"{operator}: there is no process group of {NAME} yet")


class StandInDevice(AskedModule):
    """The module ``torch.neuron``, and how operators run."""

    def __init__(self) -> None:
        self.limits = Refusals(())
        self.ready = False
        self.functional: Callable[..., Tensor] = _not_registered
        """Runs an operator that is a collective on memory."""
        self.operators: Counter[str] = Counter()
        self.programs: Counter[ProgramInfo] = Counter()
        """How often each compiled graph has run."""
        self.site = ""  # of the last one

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.touched = True
        if not _compiles():
            self.operators[operator.overloadpacket.__name__] += 1
        if operator.overloadpacket is _ATEN._fused_sdp_choice:
            return 0  # by parts: the CPU's own fused operator takes only its tensors
        if operator.overloadpacket is _ATEN.embedding and args[4:] == (True,):
            # before backward, where torch ends the process at an error of an operator
            raise NotImplementedError(
                f"{NAME} (stand-in) has no sparse tensors, and sparse=True makes a sparse gradient"
            )
        if _compiles():
            args, kwargs = tree_map(_wrapped, (args, kwargs))
        mine = {id(x.raw): x for x in tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)}
        here = bool(mine)
        if (asked := kwargs.get("device")) is not None and (here := self._own(torch.device(asked))):
            kwargs = {**kwargs, "device": _CPU}
        if mine and operator.overloadpacket not in _MIXED:
            hosts = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim())
            if any(not isinstance(x, DeviceTensor) for x in hosts):
                remedy = REMEDIES["other_device"]
                raise RuntimeError(f"{operator}: tensors of the CPU and of {NAME} in one operator: {remedy}")
        out = self.on_memory(operator, tree_map(raw, args), tree_map(raw, kwargs), narrow=here)
        if not here:
            return out
        return tree_map(lambda x: _resized(mine[id(x)], x) if id(x) in mine else _placed(x), out)

    def on_memory(self, operator: Any, args: Any, kwargs: Any, *, narrow: bool = True) -> Any:
        """Run ``operator`` on the memory of tensors, and round what it has written to the width of the hardware."""
        if operator.namespace.strip("_") in ("c10d_functional", "dtensor") and not _compiles():
            return self.functional(operator, *args)
        if operator.overloadpacket is _ATEN.histc and args[0].dtype is torch.int32:  # which the CPU does not count
            return operator(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        out = operator(*args, **kwargs)
        if narrow and self.limits.narrow and not _compiles():
            self._narrow(operator, args, kwargs, out)
        return out

    def _own(self, asked: torch.device) -> bool:
        """Whether ``asked`` is this device; RuntimeError for one of another index."""
        wrong = asked.type == NAME and asked.index not in (None, 0, LOCAL_RANK.get())
        self.limits.refuse("other_index", wrong, f"{asked} on local rank {LOCAL_RANK.get()}")
        return asked.type == NAME

    def _narrow(self, operator: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Views are of what was rounded before."""
        schema = schema_of(operator)
        written = [x for x, a in zip(args, schema.arguments, strict=False) if a.alias_info and a.alias_info.is_write]
        written += [kwargs[a.name] for a in schema.arguments if a.name in kwargs and a.alias_info]
        if all(r.alias_info is None for r in schema.returns):
            written.append(out)
        for x in tree_leaves(written):
            self.narrow(x, counted="empty" not in schema.name)  # what is not yet written has any bits

    def narrow(self, x: Any, name: str = "int64", to: Any = None, *, counted: bool = True) -> None:
        """Round memory to the width of the hardware, or to types ``to``; ``counted``: as refusals of limit ``name``,
        whole numbers that lose bits are."""
        to = self.limits.narrow if to is None else to
        if not isinstance(x, Tensor) or x.dtype not in to:
            return
        rounded = x.to(to[x.dtype]).to(x.dtype)
        # the least number stands for an infinite one
        if counted and not x.dtype.is_floating_point and not x.dtype.is_complex:
            self.limits.refused.update([name] * bool(((rounded != x) & (x != torch.iinfo(x.dtype).min)).any()))
        x.copy_(rounded)

    def set_device(self, device: Any) -> None:
        self._own(torch.device(NAME, device) if isinstance(device, int) else torch.device(device))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self.set_device(device)
        yield


_device = StandInDevice()
_libraries: list[torch.library.Library] = []


def install() -> StandInDevice:
    """Register the device, once in a process."""
    if not _libraries:
        make_device(NAME, _device)
        stand_for_package(_device)
        keys = ("_", "PrivateUse1"), ("aten", "PrivateUse1"), ("_", "AutocastPrivateUse1"), ("aten", "CPU")
        for namespace, key in keys:
            _libraries.append(torch.library.Library(namespace, "IMPL", key))
        fallback, copies, autocast, host = _libraries
        fallback.fallback(lambda operator, *args, **kwargs: _device.run(operator, args, kwargs))
        for packet in (_ATEN._to_copy, _ATEN._local_scalar_dense):  # torch.tensor(device=) finds no fallback
            copies.impl(packet.__name__, _named(packet.default))
        host.impl("pin_memory", lambda x, device=None: x)  # as loaders do
        torch.serialization.register_package(0, lambda storage: None, _restored)
        autocast.fallback(torch.library.fallthrough_kernel)
        lowered = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
        products = "linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "scaled_dot_product_attention", "convolution"
        for name in products:
            lowered.impl(name, _lowered(getattr(_ATEN, name).default))
        _libraries.append(lowered)
    return _device


def _named(operator: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _device.run(operator, args, kwargs)


def _lowered(operator: Any) -> Callable[..., Any]:
    """``operator`` under torch.autocast: with floating-point inputs in its dtype."""

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)
        lower = lambda x: x.to(dtype) if isinstance(x, Tensor) and x.dtype is torch.float32 else x  # noqa: E731
        with torch.autocast(NAME, enabled=False):
            return operator(*tree_map(lower, args), **tree_map(lower, kwargs))

    return run
