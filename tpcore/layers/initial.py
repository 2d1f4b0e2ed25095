"""Initial values of one shard: those of the unsharded tensor with the same seed, in bounded memory.

An ``init_method`` expects the full tensor. It gets a stand-in that has the full shape, holds no data and
notes the in-place fills that are asked of it; these are then replayed over slabs of the full tensor, of
which the shard keeps its part. The random stream is drawn in full on every rank, so what comes after
draws the same numbers at every tp degree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..shard import ShardSpec

Init = Callable[[Tensor], object]
_Step = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]

SLAB = 1 << 22
"""Elements of the full tensor that exist at once (16 MiB of float32)."""

_aten = torch.ops.aten
_RANDOM = {_aten.uniform_.default, _aten.normal_.default}
_POINTWISE = {
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.mul_.Tensor,
    _aten.mul_.Scalar,
    _aten.add_.Tensor,
    _aten.add_.Scalar,
    _aten.clamp_.default,
    _aten.erfinv_.default,
}


class _NeedsFullTensor(Exception):
    pass


class _Recorder(Tensor):
    """Has the shape of the full tensor and no storage; remembers fills."""

    program: list[_Step]

    @staticmethod
    def __new__(cls: type[_Recorder], spec: ShardSpec, dtype: torch.dtype) -> _Recorder:
        self: _Recorder = Tensor._make_wrapper_subclass(cls, spec.shape, dtype=dtype)
        self.program = []
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self, rest = args[0], args[1:]
        if func in (_aten.detach.default, _aten.alias.default):
            return self
        drawn = any(step[0] in _RANDOM for step in self.program)
        # a second draw over the whole tensor would come before the first draw of the next slab
        fits = func in _POINTWISE or (func in _RANDOM and not drawn)
        if not fits or any(isinstance(a, Tensor) and a.ndim for a in rest):
            raise _NeedsFullTensor(str(func))
        self.program.append((func, rest, kwargs or {}))
        return self


def _record(init: Init, spec: ShardSpec, dtype: torch.dtype) -> list[_Step] | None:
    """The fills that ``init`` asks for, or None if it does more than fill (orthogonal_, say)."""
    state = torch.get_rng_state()
    recorder = _Recorder(spec, dtype)
    try:
        init(recorder)
    except Exception:  # noqa: BLE001  whatever the stand-in cannot do: a real error comes back with the real tensor
        torch.set_rng_state(state)
        return None
    return recorder.program


def _slabs(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Runs of rows (start, stop) of at most about SLAB elements.

    Whole multiples of 16 elements, and at least 16 in the last: torch draws normals in blocks of 16, and
    in a tensor whose size 16 does not divide it draws the last 16 again.
    """
    rows = shape[0] if shape else 1
    row = max(1, torch.Size(shape[1:]).numel())
    step = max(16, SLAB // row // 16 * 16)
    start = 0
    while start < rows:
        stop = min(start + step, rows)
        if (rows - stop) * row < 16:
            stop = rows
        yield start, stop
        start = stop


def _keep(local: Tensor, slab: Tensor, start: int, spec: ShardSpec, rank: int, n: int) -> None:
    """Copy what rank ``rank`` of ``n`` holds of rows ``start``... of the full tensor."""
    stop = start + slab.shape[0]
    if spec.dim is None:
        local[start:stop] = slab
        return
    for p in spec.pieces(rank, n):
        if spec.dim == 0:
            lo, hi = max(p.full, start), min(p.full + p.length, stop)
            if lo < hi:
                local[p.local + lo - p.full : p.local + hi - p.full] = slab[lo - start : hi - start]
        else:
            part = slab.narrow(spec.dim, p.full, p.length)
            local[start:stop].narrow(spec.dim, p.local, p.length).copy_(part)


def initial_shard(init: Init, spec: ShardSpec, rank: int, n: int, dtype: torch.dtype) -> Tensor:
    """Shard ``rank`` of ``n`` of the tensor that ``init`` fills, on the CPU; padding is zero.

    Beside the shard itself at most one slab of the full tensor is in memory, unless ``init`` does more
    than fill in place, in which case the full tensor is, while this runs.
    """
    with torch.no_grad(), torch.inference_mode(False):
        # one slab needs no program; and torch.distributed.tensor, which torch imports for the first tensor
        # with a __torch_dispatch__, costs a process 0.6 s
        small = torch.Size(spec.shape).numel() <= SLAB
        program = None if small else _record(init, spec, dtype)
        if program is None:
            full = torch.empty(spec.shape, dtype=dtype, device="cpu")
            init(full)
            return spec.shard(full, rank, n)
        local = torch.zeros(spec.local_shape(n), dtype=dtype, device="cpu")
        slabs = list(_slabs(spec.shape))
        # one buffer for all: a new one each time left holes in the heap, up to ten slabs for a shard of eight
        rows = max((stop - start for start, stop in slabs), default=0)
        buffer = torch.empty((rows, *spec.shape[1:]), dtype=dtype, device="cpu")
        for start, stop in slabs:
            slab = buffer[: stop - start]
            for func, args, kwargs in program:
                func(slab, *args, **kwargs)
            _keep(local, slab, start, spec, rank, n)
        return local
