"""The collectives of a process group in graphs, as the functional ones of torch, which other compilers know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.transport import Op, Pending, Transport
from .transport import STAND_IN, C10dTransport, floats, joined, members_chunks

_FUNCTIONAL: Any = torch.ops._c10d_functional


class FunctionalTransport(Transport):
    """What ``transport`` makes, for torch.compile: one graph for all ranks, whose calls nothing watches."""

    def __init__(self, transport: Transport, exchanges: bool) -> None:
        self.group, self.size, self.members = transport.group, transport.size, transport.members
        self.index, self.position = transport.index, transport.position
        self._exchanges, self._native = exchanges, C10dTransport.native
        self._name = transport.process_group.group_name

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return self.start_all_reduce(x, op, donate)()

    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        if floats(x, op):
            return lambda: self._rows(x).amax(0)
        if not x.numel():
            return x.clone
        wide = x.to(STAND_IN.get(x.dtype, x.dtype)).contiguous()
        total = _FUNCTIONAL.all_reduce(wide, "max" if x.dtype is torch.bool else op, self._name)
        return lambda: _ended(total).to(x.dtype)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return joined(self._rows(x), dim)

    def _rows(self, x: Tensor) -> Tensor:
        """Every member's ``x``, in a new first dim."""
        if not x.numel():
            return x.new_empty((self.size, *x.shape))
        flat = x.contiguous().view(-1)
        sent = flat if x.dtype in self._native else flat.view(torch.uint8)
        gathered = _ended(_FUNCTIONAL.all_gather_into_tensor(sent, self.size, self._name))
        return (gathered if sent is flat else gathered.view(x.dtype)).view(self.size, *x.shape)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.start_reduce_scatter(x, dim, False)()

    def start_reduce_scatter(self, x: Tensor, dim: int, donate: bool) -> Pending:
        sent = members_chunks(x, dim, self.size)
        if x.dtype not in self._native or not x.numel():
            return lambda: self.all_reduce(sent, "sum", False).index_select(0, self.position)[0]
        part = _FUNCTIONAL.reduce_scatter_tensor(sent.view(-1), "sum", self.size, self._name)
        return lambda: _ended(part).view(sent.shape[1:])

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        if not self._exchanges or x.dtype not in self._native or not x.numel():
            return super().all_to_all(x, split_dim, concat_dim)
        ones = [1] * self.size
        sent = members_chunks(x, split_dim, self.size)
        return joined(_ended(_FUNCTIONAL.all_to_all_single(sent, ones, ones, self._name)), concat_dim)


def _ended(under_way: Tensor) -> Tensor:
    done: Tensor = _FUNCTIONAL.wait_tensor(under_way)
    return done
