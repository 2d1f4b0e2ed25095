"""Initial values of one rank's part: those of the unsharded tensor with the same seed, in bounded memory.

An ``init_method`` expects the full tensor. It gets a stand-in that has the full shape, holds no data and
notes the in-place fills that are asked of it; these are then replayed over slabs of the full tensor, of
which the rank keeps its boxes. The random stream is drawn in full on every rank, so what comes after
draws the same numbers at every tp degree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..boxes import Box, narrowed
from ..layout import Layout
from ..mesh import Mesh

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
    def __new__(cls: type[_Recorder], shape: tuple[int, ...], dtype: torch.dtype) -> _Recorder:
        self: _Recorder = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
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


def _record(init: Init, shape: tuple[int, ...], dtype: torch.dtype) -> list[_Step] | None:
    """The fills that ``init`` asks for, or None if it does more than fill (orthogonal_, say)."""
    state = torch.get_rng_state()
    recorder = _Recorder(shape, dtype)
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


def _keep(local: Tensor, slab: Tensor, start: int, boxes: Iterable[Box]) -> None:
    """Copy what lies in ``boxes`` of rows ``start``... of the full tensor."""
    for box in boxes:
        lo = max(box.full[0], start)
        size = (min(box.full[0] + box.size[0], start + slab.shape[0]) - lo, *box.size[1:])
        if size[0] > 0:
            to = narrowed(local, (box.local[0] + lo - box.full[0], *box.local[1:]), size)
            to.copy_(narrowed(slab, (lo - start, *box.full[1:]), size))


def initial_part(init: Init, layout: Layout, rank: int, mesh: Mesh, dtype: torch.dtype) -> Tensor:
    """What ``rank`` of ``mesh`` holds of the tensor that ``init`` fills, on the CPU; padding is zero.

    Beside the part itself at most one slab of the full tensor is in memory, unless ``init`` does more
    than fill in place, in which case the full tensor is, while this runs.
    """
    with torch.no_grad(), torch.inference_mode(False):
        # one slab needs no program; and torch.distributed.tensor, which torch imports for the first tensor
        # with a __torch_dispatch__, costs a process 0.6 s
        small = torch.Size(layout.shape).numel() <= SLAB
        program = None if small else _record(init, layout.shape, dtype)
        if program is None:
            full = torch.empty(layout.shape, dtype=dtype, device="cpu")
            init(full)
            return layout.shard(full, rank, mesh)
        local = torch.zeros(layout.local_shape(mesh), dtype=dtype, device="cpu")
        slabs = list(_slabs(layout.shape))
        # one buffer for all: a new one each time left holes in the heap, up to ten slabs for a part of eight
        rows = max((stop - start for start, stop in slabs), default=0)
        buffer = torch.empty((rows, *layout.shape[1:]), dtype=dtype, device="cpu")
        for start, stop in slabs:
            slab = buffer[: stop - start]
            for func, args, kwargs in program:
                func(slab, *args, **kwargs)
            _keep(local, slab, start, layout.boxes(rank, mesh))
        return local
