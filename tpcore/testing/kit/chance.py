"""Which calls the conformance kit draws, from a seed, for all ranks alike, and where in memory their tensors lie."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backend.interface import Capabilities
from ...comm.comm import Comm
from ...comm.transport import Primitive
from .collectives import TRIED, primitive_of
from .samples import kinds

_EDGES = (64, 1 << 10, 1 << 13, 1 << 16, 1 << 18)
SIZES = (
    *((0, 0, False), (1, 1, False), (2, 62, False)),
    *((edge + beside, edge + beside, False) for edge in _EDGES[:3] for beside in (-1, 0, 1)),
    *((edge - 1, edge + 1, False) for edge in _EDGES[3:]),
    *((low + 2, high - 2, False) for low, high in pairwise(_EDGES)),
    *((edge, edge, True) for edge in (1 << 12, 1 << 16, 1 << 18, 1 << 20)),
)
"""Classes of sizes: the least and most elements, or, with True, the bytes of an edge: both sides of every number at
which a backend may change its way, and what lies between."""


class DrawnCall(NamedTuple):
    """A call, the same on all ranks of its group. Along dim ``same`` all numbers are equal."""

    number: int
    method: str
    comm: Comm
    options: dict[str, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str
    same: int | None
    inference: bool

    @property
    def primitive(self) -> Primitive:
        return primitive_of(self.method)

    @property
    def reduced(self) -> str:
        return str(self.options.get("op", "sum")) if self.primitive.sums else ""

    @property
    def donated(self) -> bool:
        return bool(self.options.get("donate"))

    def __str__(self) -> str:
        options, n = " ".join(f"{k}={v}" for k, v in self.options.items()), math.prod(self.shape)
        inside = ", in inference_mode" if self.inference else ""
        size = f"{n} elements, {n * self.dtype.itemsize} bytes, {self.kind} numbers{inside}"
        return f"{self.method} {options} over {'.'.join(self.comm.group.axes)} of {self.dtype} {self.shape} ({size}"


class Chance:
    """Draws calls over ``comms``, of dtypes that a backend ``can`` take and of at most ``most`` elements."""

    def __init__(self, seed: str, comms: Sequence[Comm], can: Capabilities, most: int) -> None:
        self.random, self._comms, self._can, self._most = Random(seed), comms, can, most

    def points(self, method: str) -> Iterator[tuple[str, dict[str, Any], torch.dtype, Any]]:
        can, takes = self._can, inspect.signature(getattr(Comm, method)).parameters
        switches: dict[str, tuple[Any, ...]] = {"op": ("sum", "max"), "donate": (False, True)}
        for chosen in product(*([(name, v) for v in switches[name]] for name in switches if name in takes)):
            sums = primitive_of(method).sums
            dtypes = can.sums()[dict(chosen).get("op", "sum")] if sums else {*can.dtypes, *can.moved}
            for dtype, size in product(sorted(dtypes, key=str), SIZES):
                yield method, dict(chosen), dtype, size

    def call(self, number: int, method: str, switches: dict[str, Any], dtype: torch.dtype, size: Any) -> DrawnCall:
        chance, comm, primitive = self.random, self.random.choice(self._comms), primitive_of(method)
        low, high, in_bytes = size
        count = low // dtype.itemsize + chance.choice((-1, 0, 1)) if in_bytes else chance.randint(low, high)
        count = min(count, self._most)
        if count >= comm.size and (primitive.divides or chance.random() < 0.3):  # a chunk, or the result, is as large
            count = count // comm.size if count * comm.size > self._most or chance.random() < 0.5 else count
        shape = self._shape(count, bool({"dim", "split_dim"} & primitive.arguments.keys()))
        options = {name: self._argument(name, len(shape), comm.size) for name in primitive.arguments} | switches
        if primitive.divides:
            along = options[primitive.divides] % len(shape)
            shape = (*shape[:along], shape[along] * comm.size, *shape[along + 1 :])
        same = None if switches.get("donate") else chance.choice((None, None, *range(len(shape))))
        call = DrawnCall(number, method, comm, options, dtype, shape, "", same, chance.random() < 0.2)
        return call._replace(kind=chance.choice(kinds(dtype, call.reduced)))

    def _shape(self, count: int, dims: bool) -> tuple[int, ...]:
        """Of ``count`` elements, and up to eight dims."""
        if count == 1 and not dims and self.random.random() < 0.5:
            return ()
        shape = [1] * self.random.randint(1, 8)
        if not count:
            shape[self.random.randrange(len(shape))] = 0
            return tuple(n * self.random.randint(1, 3) for n in shape)
        factor = 2
        while count > 1:
            while count % factor:
                factor = factor + 1 if factor * factor <= count else count
            count //= factor
            shape[self.random.randrange(len(shape))] *= factor
        return tuple(shape)

    def _argument(self, name: str, ndim: int, n: int) -> Any:
        if name == "to":
            holes = self.random.choice((0.0, 0.4))
            return [None if self.random.random() < holes else t for t in self.random.sample(range(n), n)]
        return self.random.choice(TRIED[name.replace("concat", "split")](ndim, n))


_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
WAYS = ("contiguous", "part of more", "permuted", "strided", "lazy", "in a graph")


class Placed(NamedTuple):
    """``x`` is ``view(memory)``; all of it that is not of ``x`` lies about it."""

    x: Tensor
    memory: Tensor
    view: Callable[[Tensor], Tensor]
    how: str

    def unlike(self, before: Tensor, donated: bool) -> bool:
        """Whether the memory differs from what it was ``before``; if ``donated`` only what is not of ``x``."""
        if donated:
            self.view(before).copy_(self.x)
        now, then = (torch.view_as_real(m) if m.is_complex() else m for m in (self.memory, before))
        return not torch.equal(now.view(torch.uint8), then.view(torch.uint8))


def placed(
    own: Random, way: str, shape: tuple[int, ...], dtype: torch.dtype, same: int | None, device: torch.device
) -> Placed:
    """Dims in any order, with gaps, an offset and, for the dim ``same``, a stride of 0; conjugated or negated lazily
    where the dtype has that, by public functions of torch."""
    lazy = way == "lazy" and (dtype.is_complex or dtype in _COMPLEX)
    plain, order = way in ("contiguous", "in a graph"), list(range(len(shape)))
    if way in ("permuted", "strided", "lazy"):
        own.shuffle(order)
    at = own.choice((1, 2, 3)) if way in ("strided", "lazy") else 1
    strides = [0] * len(shape)
    for dim in reversed(order):
        if plain or dim != same:
            strides[dim], at = at, at * max(1, shape[dim])
    offset = 0 if plain else own.randrange(1, 17)
    kept = _COMPLEX.get(dtype, dtype) if lazy else dtype
    memory = torch.zeros(offset + at + 8 * (not plain), dtype=kept, device=device)

    def view(whole: Tensor) -> Tensor:
        x = whole.as_strided(shape, strides, offset)
        if not lazy:
            return x
        return x.conj() if dtype.is_complex else x.conj().imag

    x = view(memory)
    kind = ("lazily conjugated, " if dtype.is_complex else "lazily negated, ") if lazy else ""
    how = f"{kind}strides {x.stride()}" + (", requires_grad" if way == "in a graph" else "")
    return Placed(x, memory, view, f"{how}, storage offset {offset}" if offset else how)
