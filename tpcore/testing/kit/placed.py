"""Where in memory a tensor lies that the conformance kit sends."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

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
