"""Counts a recorded step's operators, FLOPs and bytes, and follows the memory that its tensors hold, by phases and
parts: what is before the layers, each layer, what is after them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpcore import nested
from tpcore.private import TorchDispatchMode, schema_of
from tpcore_explain.recording import Collective, Recorder

BEFORE, AFTER = "before the layers", "after the layers"
ATTENTION, GROUPED = "attention", "grouped_mm"
SCORES = "scores"
"""What attention writes and reads that is no fused kernel: scores, probabilities, and what dropout leaves of them."""
_PASSES = 6, 10  # over the scores, forward and backward
_aten = torch.ops.aten
_FREE = {_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided, _aten.detach, _aten._unsafe_view}
_FREE |= {_aten.lift_fresh, _aten.scalar_tensor, _aten.new_empty_strided}
_PICKED = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}  # they read as much as they write
# older torch has neither (2.6), or the private one alone
_GROUPED = [getattr(torch, "_grouped_mm", None), getattr(nn.functional, "grouped_mm", None)]
_KERNEL = {
    _aten._scaled_dot_product_flash_attention_for_cpu: 1.0,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: 2.5,
}


@dataclass(frozen=True)
class Operator:
    """``times`` alike of a step, on average. ``nbytes``: read and written by one."""

    name: str
    flops: float
    nbytes: float
    times: float = 1.0


@dataclass
class PartCosts:
    """One phase of one part of a model. ``delta``: bytes held at its end less those at its begin; ``excess``: the most
    that it held above those at its begin."""

    operators: list[Operator] = field(default_factory=list)
    calls: list[tuple[Collective, float]] = field(default_factory=list)
    """Collectives, and the bytes that each of them gets."""
    delta: float = 0.0
    excess: float = 0.0


class Meter(TorchDispatchMode):
    """Meters the operators inside ``on``. ``layers``: names of modules, each of which is a region of its own."""

    def __init__(self, layers: Iterable[str], results: dict[Any, Any]) -> None:
        """``results``: kinds of tensors and costs, of operators that meters before have run. Many are alike, and their
        checks of shapes take most of the time of a recording."""
        super().__init__()
        self.parts: dict[tuple[str, str], PartCosts] = {}
        """By phase and region."""
        self._at, self._part = ("", ""), PartCosts()  # where the step is
        self._results, self._layers = results, tuple(layers)
        self.shares: Mapping[str, float] = {}
        """By the name of a layer of experts, the part of its grouped matmuls' rows that is computed."""
        self._live = 0.0
        self._entry = 0.0
        self._storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._before: set[str] = set()  # modules that ran before all layers
        self._inside = False  # whether a layer has run

    @contextmanager
    def on(self, recorder: Recorder, model: nn.Module, inputs: Any) -> Iterator[None]:
        """Meter what runs inside the block; ``model``'s own tensors and ``inputs`` are no part of what is held."""
        self._recorder = recorder
        tensors = [*model.parameters(), *model.buffers(), *nested.tensors(inputs)]
        self._excluded = [t.untyped_storage() for t in tensors]  # kept, so that no other storage gets their place
        self._excluded_keys = {storage._cdata for storage in self._excluded}
        with self, _Kernels(self):
            yield
        self._part.delta += self._live - self._entry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        key = None if func.is_view or schema_of(func).is_mutable else (func, _signature(args), _signature(kwargs))
        if key in self._results:
            shape, stride, dtype, cost = self._results[key]
            out = _aten.empty_strided.default(shape, stride, dtype=dtype, device="meta")
        else:
            out = func(*args, **kwargs)
            cost = None if func.is_view or packet in _FREE else cost_of(packet, args, kwargs, out)
            if key is not None and _is_new(out, (args, kwargs)):
                self._results[key] = out.shape, out.stride(), out.dtype, cost
        if cost is None:
            self._enter()
        else:
            self.note(*cost)
        for t in nested.tensors(out):
            self._hold(t.untyped_storage())
        return out

    def note(self, name: str, flops: float, nbytes: float, times: int = 1) -> None:
        """``times`` operators that have these FLOPs and bytes together."""
        self._enter()
        if name == GROUPED:
            module = self._recorder.module
            flops *= next((s for experts, s in self.shares.items() if f"{module}.".startswith(f"{experts}.")), 1.0)
        if name != "zeros_like" or self._at[0] != "optimizer":  # which makes its state in its first step alone
            self._part.operators.append(Operator(name, flops / times, nbytes / times, times))

    def _enter(self) -> None:
        """Go on where the phase or the part of the model is another one than before."""
        phase = self._recorder.phase
        region = self.region(phase, self._recorder.module)
        if self._at[0] == phase and region in (None, self._at[1]):
            return
        self._part.delta += self._live - self._entry
        self._at, self._entry = (phase, region or AFTER), self._live
        self._part = self.parts.setdefault(self._at, PartCosts())
        self._part.excess = max(self._part.excess, self._part.delta)

    def region(self, phase: str, module: str) -> str | None:
        """The part that ``module`` is of; None where it cannot be told: then it is the one of the operator before."""
        for layer in self._layers:
            if module == layer or module.startswith(f"{layer}."):
                self._inside = True
                return layer
        if phase == "forward":
            if not self._inside:
                self._before.add(module)
            return AFTER if self._inside else BEFORE
        if phase == "backward":
            return None if not module else BEFORE if module in self._before and "." in module else AFTER
        return AFTER

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._excluded_keys or key in self._storages:
            return
        self._storages[key] = storage
        self._live += nbytes
        weakref.finalize(storage, self._release, nbytes)
        self._part.excess = max(self._part.excess, self._part.delta + self._live - self._entry)

    def _release(self, nbytes: int) -> None:
        self._live -= nbytes


def _is_new(out: Any, inputs: Any) -> bool:
    """Whether ``out`` is one meta tensor with memory of its own, in whose place another one would do."""
    if type(out) is not Tensor or not out.is_meta or out.storage_offset():
        return False
    storage = out.untyped_storage()
    extent = 1 + sum((n - 1) * step for n, step in zip(out.shape, out.stride(), strict=True))
    if out.numel() and storage.nbytes() != extent * out.element_size():
        return False
    return all(t.untyped_storage()._cdata != storage._cdata for t in nested.tensors(inputs))


def _signature(value: Any) -> Any:
    """Equal for arguments of which an operator makes tensors of the same kind at the same cost."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.untyped_storage().nbytes()
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((k, _signature(v)) for k, v in value.items())
    if isinstance(value, float) and math.isnan(value):  # which equals no other
        return float, "nan"
    return type(value), value


def cost_of(packet: Any, args: Any, kwargs: Any, out: Any) -> tuple[str, float, float]:
    """The name of an operator, its FLOPs, and the bytes that it reads and writes."""
    from torch.utils.flop_counter import flop_registry  # it imports a compiler

    written = list(nested.tensors(out))
    read = list(nested.tensors((args, kwargs)))
    name, flops = packet.__name__, 0.0
    if packet in _KERNEL:  # first: torch has counted them since 2.15, by all pairs where half of them are hidden too
        backward = _KERNEL[packet] > 1
        q, k, v = args[1:4] if backward else args[:3]
        causal = args[7] if backward else (len(args) > 4 and args[4]) or kwargs.get("is_causal", False)
        name, flops = ATTENTION, _KERNEL[packet] * attention_flops(q, k, v, causal)
    elif packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet in _PICKED:
        return name, flops, 2.0 * sum(map(_nbytes, written))
    return name, flops, float(sum(map(_nbytes, read)) + sum(map(_nbytes, written)))


def attention_flops(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """Of a fused forward, ``[..., tokens, features]``; a causal one passes over the keys that are hidden."""
    pairs = float(q.shape[-2] * k.shape[-2])
    if causal:
        pairs = pairs / 2 + q.shape[-2] / 2
    return float(2.0 * q.shape[:-2].numel() * pairs * (q.shape[-1] + v.shape[-1]))


def _nbytes(t: Tensor) -> int:
    """Of what is read or written: an expanded tensor's own memory."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


class _Kernels(TorchFunctionMode):
    """Puts ``_Kernel`` in the place of fused attention, which on meta tensors holds all scores, and grouped matmuls."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            q, k, v = args
            flops = attention_flops(q, k, v, bool(kwargs.get("is_causal")))
            return _Kernel.apply(self._meter, ATTENTION, flops, 1, q, k, v)
        if func in _GROUPED:
            x, weight = args[:2]
            return _Kernel.apply(self._meter, GROUPED, 2.0 * x.numel() * weight.shape[-1], len(weight), x, weight)
        return func(*args, **kwargs)


class _Kernel(torch.autograd.Function):
    """An operator noted as a whole. Grouped: ``[T, K], [G, K, N] -> [T, N]``. Attention keeps beside its inputs its
    output and a number for each query and head (Dao et al. 2022, arXiv:2205.14135)."""

    @staticmethod
    def forward(ctx: Any, meter: Meter, name: str, flops: float, times: int, *inputs: Tensor) -> Tensor:
        first, last = inputs[0], inputs[-1]
        out = first.new_empty(*first.shape[:-1], last.shape[-1])
        saved: tuple[Tensor, ...] = ()
        if name == ATTENTION:
            saved = out, first.new_empty(first.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(*inputs, *saved)
        ctx.meter, ctx.inputs = meter, len(inputs)
        ctx.cost = name, flops, float(sum(map(_nbytes, (*inputs, out)))), times
        meter.note(*ctx.cost)
        ctx.scores = 0 if name != ATTENTION else out.shape[:-1].numel() * inputs[1].shape[-2] * out.element_size()
        if ctx.scores:
            meter.note(SCORES, 0.0, float(_PASSES[0] * ctx.scores))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        name, flops, nbytes, times = ctx.cost
        # attention computes its scores again; grouped are the gradients of rows, and of matrices
        for cost in [(2.5 * flops, 2.0 * nbytes)] if name == ATTENTION else [(flops, nbytes)] * 2:
            ctx.meter.note(name, *cost, times)
        if ctx.scores:
            ctx.meter.note(SCORES, 0.0, float(_PASSES[1] * ctx.scores))
        return None, None, None, None, *map(torch.empty_like, ctx.saved_tensors[: ctx.inputs])
