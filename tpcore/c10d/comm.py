"""The collectives of one torch.distributed process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import Comm, Op, Pending
from ..mesh import Group
from .supervision.waiting import Waiting


def _options(made: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(made, name, value)
    return made


_CPU = torch.device("cpu")
_SUM = dist.ReduceOp.SUM
ALL_REDUCE = {
    "sum": _options(dist.AllreduceOptions(), reduceOp=_SUM),
    "max": _options(dist.AllreduceOptions(), reduceOp=dist.ReduceOp.MAX),
}
# bool is native, but the sum of two would leave bytes of 2, which no other operator of torch expects
_STAND_IN = {torch.bool: torch.uint8, torch.int16: torch.int32}


class C10dComm(Comm):
    """``pg`` gives the torch.distributed group; for a group of one it may never be asked."""

    native: ClassVar[frozenset[torch.dtype]] = frozenset(
        getattr(torch, name)
        for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
    )
    """What the transport itself moves and reduces; others travel as bytes, which can only be moved."""

    def __init__(
        self,
        group: Group,
        position: int,
        pg: Callable[[], Any],
        device: torch.device = _CPU,
        watch: Waiting | None = None,
    ) -> None:
        super().__init__(group, torch.tensor([position]).to(device))
        self._position, self._pg, self._watch = position, pg, watch
        if watch is not None:
            self._enter, self._finish = watch.enter, watch.finish  # type: ignore[method-assign]
        if group.size > 1:
            self._calls = self._handle(pg())

    @property
    def process_group(self) -> Any:
        return self._pg()

    def close(self) -> None:
        """Let the transport's objects go."""
        self._calls = None

    # -- what a transport may do in its own way -----------------------------------------------------------
    def _handle(self, pg: Any) -> Any:
        """The object that collectives are called on."""
        return pg

    def _enter(self, op: str, x: Tensor) -> None:
        """Before every collective."""

    def _finish(self, work: Any) -> None:
        """Wait for a collective: on a device, make its stream wait."""
        work.wait()

    # -- the primitives -----------------------------------------------------------------------------------
    def _all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return self._start_all_reduce(x, op, donate)()

    def _start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        dtype, wide = x.dtype, x
        if dtype not in self.native:
            self._check_reducible(x, op)
            wide = x.to(_STAND_IN.get(dtype, dtype))
        self._enter(f"all_reduce {op}", x)
        out = wide if (donate or wide is not x) and wide.is_contiguous() else copied(wide)
        # of bits the sum is "any", and so is the maximum
        work = self._calls.allreduce([out], ALL_REDUCE["max" if dtype is torch.bool else op])

        def wait() -> Tensor:
            self._finish(work)
            return out if wide is x else out.to(dtype)

        return wait

    def _all_gather(self, x: Tensor, dim: int) -> Tensor:
        self._enter(f"all_gather dim {dim}", x)
        x = x.detach().contiguous()
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._finish(self._calls._allgather_base(self._wire(out), self._wire(x)))
        if dim == 0:
            return out
        shape = (*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :])
        return out.view(self.size, *x.shape).movedim(0, dim).contiguous().view(shape)

    def _reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self._check_reducible(x, "sum")
        self._enter(f"reduce_scatter dim {dim}", x)
        if x.dtype not in self.native:
            out = self.split(self._start_all_reduce(x, "sum", False)(), dim)
            return out.contiguous()
        sent = self._chunks(x, dim)
        out = torch.empty_like(sent[0])
        # flat: some transports divide only the first dim, others compare shapes
        options = _options(dist.ReduceScatterOptions(), reduceOp=_SUM)
        self._finish(self._calls._reduce_scatter_base(out.view(-1), sent.view(-1), options))
        return out

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        self._enter(f"broadcast from {src}", x)
        out = copied(x) if src == self._position else x.new_empty(x.shape)
        options = _options(dist.BroadcastOptions(), rootRank=src)
        self._finish(self._calls.broadcast([self._wire(out)], options))
        return out

    def _chunks(self, x: Tensor, dim: int) -> Tensor:
        """The members' chunks of ``x`` one after another in memory, in a new first dim."""
        split = x.detach().reshape(*x.shape[:dim], self.size, x.shape[dim] // self.size, *x.shape[dim + 1 :])
        return split.movedim(dim, 0).contiguous()

    def _wire(self, x: Tensor) -> Tensor:
        """A contiguous tensor as the transport takes it: to move is not to compute, so bytes will do."""
        return x if x.dtype in self.native else x.view(-1).view(torch.uint8)

    def _check_reducible(self, x: Tensor, op: Op) -> None:
        dtype = x.dtype
        if dtype in self.native or dtype in _STAND_IN or (dtype.is_complex and op == "sum"):
            return
        raise ValueError(f"cannot take the {op} of {dtype} over ranks: convert it to a wider dtype first")


def copied(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)
