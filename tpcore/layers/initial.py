"""Initial values of one rank's part: those of the unsharded tensor with the same seed, in bounded memory.

An ``init_method`` expects the full tensor. It gets a recorder with the full shape and no data, which records
in-place fills. The fills are then replayed over slabs of the full tensor, and the rank keeps its boxes of
each slab. Every rank draws the full random stream, so later draws are the same at every tp degree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..layout.layout import Layout
from ..layout.mesh import Mesh
from ..layout.slices import Box, narrowed
from ..private import make_wrapper, no_torch_function

Init = Callable[[Tensor], object]
_Step = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]

SLAB = 1 << 22
"""Elements of the full tensor in memory at a time (16 MiB of float32)."""

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


class _Recorder(Tensor):
    """A tensor with the full shape and no storage, which records fills."""

    program: list[_Step]

    @staticmethod
    def __new__(cls: type[_Recorder], shape: tuple[int, ...], dtype: torch.dtype) -> _Recorder:
        self: _Recorder = make_wrapper(cls, shape, dtype=dtype)
        self.program = []
        return self

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self, rest = args[0], args[1:]
        if func in (_aten.detach.default, _aten.alias.default):
            return self
        drawn = any(step[0] in _RANDOM for step in self.program)
        # two draws: slab by slab, the second draw of a slab would come before the first of the next slab
        fits = func in _POINTWISE or (func in _RANDOM and not drawn)
        if not fits or any(isinstance(a, Tensor) and a.ndim for a in rest):
            raise NotImplementedError(f"{func} of a tensor without data")
        self.program.append((func, rest, kwargs or {}))
        return self


def _record(init: Init, shape: tuple[int, ...], dtype: torch.dtype) -> list[_Step] | None:
    """The fills of ``init``, or None if it does more than fill (orthogonal_, for example)."""
    state = torch.get_rng_state()
    recorder = _Recorder(shape, dtype)
    try:
        init(recorder)
    except Exception:  # noqa: BLE001  the recorder supports little; init runs again, on a real tensor
        torch.set_rng_state(state)
        return None
    return recorder.program


def _slabs(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Runs of rows (start, stop) of at most about SLAB elements: multiples of 16, and 16 or more in the last. torch
    draws normals in blocks of 16, and the last 16 again if 16 does not divide the size."""
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
    """Copy the parts of ``boxes`` that are in ``slab``, which begins at row ``start`` of the full tensor."""
    for box in boxes:
        lo = max(box.full[0], start)
        size = (min(box.full[0] + box.size[0], start + slab.shape[0]) - lo, *box.size[1:])
        if size[0] > 0:
            target = narrowed(local, (box.local[0] + lo - box.full[0], *box.local[1:]), size)
            target.copy_(narrowed(slab, (lo - start, *box.full[1:]), size))


def initial_part(init: Init, layout: Layout, rank: int, mesh: Mesh, dtype: torch.dtype) -> Tensor:
    """The part of ``rank`` of the tensor that ``init`` fills, on the CPU. Padding is zero. Besides it one slab of the
    full tensor is in memory, or all of it if ``init`` does more than fill in place."""
    with torch.no_grad(), torch.inference_mode(False):
        # no recorder for a single slab: for the first tensor with a __torch_dispatch__, torch imports
        # torch.distributed.tensor, which takes 0.6 s per process
        small = torch.Size(layout.shape).numel() <= SLAB
        program = None if small else _record(init, layout.shape, dtype)
        if program is None:
            full = torch.empty(layout.shape, dtype=dtype, device="cpu")
            init(full)
            return layout.shard(full, rank, mesh)
        local = torch.zeros(layout.local_shape(mesh), dtype=dtype, device="cpu")
        slabs = list(_slabs(layout.shape))
        # one buffer for all slabs: one for each left holes in the heap, up to ten slabs for a part of eight
        rows = max((stop - start for start, stop in slabs), default=0)
        buffer = torch.empty((rows, *layout.shape[1:]), dtype=dtype, device="cpu")
        for start, stop in slabs:
            slab = buffer[: stop - start]
            for func, args, kwargs in program:
                func(slab, *args, **kwargs)
            _keep(local, slab, start, layout.boxes(rank, mesh))
        return local


def unsharded(init: Init, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    """The full initial values on the CPU. The random state is as before."""
    state = torch.get_rng_state()
    full = torch.empty(shape, dtype=dtype, device="cpu")
    with torch.no_grad():
        init(full)
    torch.set_rng_state(state)
    return full


def kaiming_uniform(weight: Tensor) -> Tensor:
    """The initial weight of ``nn.Linear``."""
    return nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def uniform_bias(fan_in: int) -> Init:
    """The initial bias of ``nn.Linear`` with so many inputs."""
    bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    return lambda t: nn.init.uniform_(t, -bound, bound)
