"""The collectives of one torch.distributed process group."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..backend.interface import Capabilities
from ..comm.transport import CPU, PRIMITIVES, Op, Pending, Transport, as_stored, inverse
from ..layout.mesh import Group
from ..private import gather_flat
from .supervision.waiting import Waiting


def _options(options: Any, name: str, value: Any) -> Any:
    setattr(options, name, value)
    return options


_REDUCE = {
    "sum": _options(dist.AllreduceOptions(), "reduceOp", dist.ReduceOp.SUM),
    "max": _options(dist.AllreduceOptions(), "reduceOp", dist.ReduceOp.MAX),
}
_SCATTER = _options(dist.ReduceScatterOptions(), "reduceOp", dist.ReduceOp.SUM)
_ALL_TO_ALL = dist.AllToAllOptions()
# bool is native, but the sum of two bools would be a byte of 2, which no other torch operator expects
STAND_IN = {torch.bool: torch.uint8, torch.int16: torch.int32}


class C10dTransport(Transport):
    """``pg`` returns the torch.distributed group; for a group of one it may never be called."""

    compares = True  # the watch compares the calls, over its own connections
    native: ClassVar[frozenset[torch.dtype]] = frozenset(
        getattr(torch, name)
        for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
    )
    """Dtypes that the transport itself moves and reduces. Others travel as bytes and can only be moved."""
    can = Capabilities()
    """Of the backend: what the library has no call for is gathered."""

    def __init__(
        self, group: Group, rank: int, pg: Callable[[], Any], device: torch.device = CPU, watch: Waiting | None = None
    ) -> None:
        super().__init__(group, rank, device)
        self._pg, self._watch = pg, watch
        self.finish: Callable[[Any], None] = methodcaller("wait") if watch is None else watch.finish
        if group.size > 1:
            self._calls = self._handle(pg())

    @property
    def process_group(self) -> Any:
        return self._pg()

    def close(self) -> None:
        """Drop the reference to the process group."""
        self._calls = None

    def _handle(self, pg: Any) -> Any:
        """The object that collectives are called on."""
        return pg

    def _enter(self, primitive: str, x: Tensor, *arguments: Any) -> None:
        if self._watch is not None:
            self._watch.enter(PRIMITIVES[primitive].describe(*arguments), x)

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        # what waits at once may read the input until then
        at_once = reduced_here(x, op, self.can)
        return self._started_here(as_stored(x), op)() if at_once else self.start_all_reduce(x, op, donate)()

    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        if reduced_here(x, op, self.can):
            return self._started_here(copied(x), op)
        x = as_stored(x)
        dtype = x.dtype
        wide = x if dtype in self.native else x.to(STAND_IN.get(dtype, dtype))
        self._enter("all_reduce", x, op)
        out = wide if (donate or wide is not x) and wide.is_contiguous() else copied(wide)
        # the sum of bools is "any", and so is their maximum
        pending = self._pending(out, self._calls.allreduce, [out], _REDUCE["max" if dtype is torch.bool else op])
        return pending if wide is x else lambda: pending().to(dtype)

    def _started_here(self, x: Tensor, op: Op) -> Pending:
        self._enter("all_reduce", x, op)
        gathered = self._started_rows(x.contiguous())
        return lambda: reduced(gathered(), op)

    def _started_rows(self, x: Tensor) -> Pending:
        """Every member's contiguous ``x``, which stays as it is until the wait, in a new first dim."""
        rows = x.new_empty((self.size, *x.shape))
        return self._pending(rows, gather_flat, self._calls, self._wire(rows).view(-1), self._wire(x).view(-1))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self._enter("all_gather", x, dim)
        x = as_stored(x).contiguous()
        rows = self._started_rows(x)()
        return joined(rows, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self._started_scatter(members_chunks(as_stored(x), dim, self.size), x, dim)()

    def start_reduce_scatter(self, x: Tensor, dim: int, donate: bool) -> Pending:
        sent = members_chunks(as_stored(x), dim, self.size)
        return self._started_scatter(sent if donate or sent.data_ptr() != x.data_ptr() else sent.clone(), x, dim)

    def _started_scatter(self, sent: Tensor, x: Tensor, dim: int) -> Pending:
        """Of the members' chunks of ``x``, which stay as they are until the wait."""
        if x.dtype not in self.native or reduced_here(x, "sum", self.can):
            total = self.start_all_reduce(sent, "sum", False)
            return lambda: total().select(0, self.index).clone()
        self._enter("reduce_scatter", x, dim)
        out = sent.new_empty(sent.shape[1:])
        # flat: some transports divide only dim 0, others compare shapes
        return self._pending(out, self._calls._reduce_scatter_base, out.view(-1), sent.view(-1), _SCATTER)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        self._enter("broadcast", x, src)
        if not self.can.broadcasts:
            return self._started_rows(as_stored(x).contiguous())()[src].clone()
        out = copied(x) if src == self.index else x.new_empty(x.shape)
        root = _options(dist.BroadcastOptions(), "rootRank", src)
        return self._pending(out, self._calls.broadcast, [self._wire(out)], root)()

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        self._enter("all_to_all", x, split_dim, concat_dim)
        return joined(self._started_exchange(members_chunks(as_stored(x), split_dim, self.size))(), concat_dim)

    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        return self._started_permute(as_stored(x).contiguous(), to)()

    def start_permute(self, x: Tensor, to: tuple[int, ...]) -> Pending:
        return self._started_permute(copied(x), to)

    def _started_permute(self, x: Tensor, to: tuple[int, ...]) -> Pending:
        """Of contiguous ``x``, which stays as it is until the wait."""
        self._enter("permute", x, to)
        target, source = to[self.index], inverse(to)[self.index]
        if not self.can.unequal_parts:
            gathered = self._started_rows(x)
            return lambda: gathered()[source].clone() if source >= 0 else torch.zeros_like(gathered()[0])
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        sent, received = self._wire(x).view(-1), self._wire(out).view(-1)
        # one all-to-all of unequal parts: sends and receives start together, and ``finish`` can wait for it
        # in slices, which gloo's work object for a single receive does not allow
        send_sizes = [sent.numel() if r == target else 0 for r in range(self.size)]
        receive_sizes = [received.numel() if r == source else 0 for r in range(self.size)]
        if source < 0:
            out.zero_()
        received, sent = received[: sum(receive_sizes)], sent[: sum(send_sizes)]
        return self._pending(out, self._calls.alltoall_base, received, sent, receive_sizes, send_sizes, _ALL_TO_ALL)

    def _started_exchange(self, sent: Tensor) -> Pending:
        """Send row ``i`` of ``sent`` to member ``i``; the result is the received rows in the group's order."""
        if not self.can.exchanges(self.members):
            gathered = self._started_rows(sent)
            return lambda: gathered()[:, self.index]
        rows = torch.empty_like(sent)
        return self._pending(rows, self._calls.alltoall_base, self._wire(rows), self._wire(sent), [], [], _ALL_TO_ALL)

    def _pending(self, out: Tensor, call: Callable[..., Any], *arguments: Any) -> Pending:
        """Start the ``call``, which writes ``out``. Nothing is sent of no elements: not all libraries take them."""
        if out.numel() == 0:
            return lambda: out
        work = call(*arguments)

        def wait() -> Tensor:
            with torch.inference_mode(out.is_inference()):  # that of the start: torch's groups end in place
                self.finish(work)
            return out

        return wait

    def _wire(self, x: Tensor) -> Tensor:
        """Contiguous ``x`` in a dtype that the transport moves: as bytes if its own dtype is not native."""
        # flat by its strides: those of no or one element may be any, and a view keeps them
        return x if x.dtype in self.native else x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def members_chunks(x: Tensor, dim: int, size: int) -> Tensor:
    """The members' chunks of ``x`` one after another in memory, in a new first dim."""
    split = x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return (split if dim == 0 else split.movedim(dim, 0)).contiguous()


def joined(rows: Tensor, dim: int) -> Tensor:
    """Members' rows in the first dim, one after another along ``dim``."""
    return (rows if dim == 0 else rows.movedim(0, dim)).flatten(dim, dim + 1).contiguous()


def reduced_here(x: Tensor, op: Op, can: Capabilities) -> bool:
    """Whether members' tensors are gathered and then reduced: for a maximum of numbers among which may be NaN, which
    gloo's own has or not, depending on the order of the ranks; and for whole numbers where these have no sums."""
    if x.is_floating_point():
        return op == "max"
    return not (can.whole_sums or x.is_complex() or x.dtype.itemsize == 1)


def reduced(rows: Tensor, op: Op) -> Tensor:
    return rows.amax(0) if op == "max" else rows.sum(0, dtype=rows.dtype)


def copied(x: Tensor) -> Tensor:
    return as_stored(x).clone(memory_format=torch.contiguous_format)


_FUNCTIONAL: Any = torch.ops._c10d_functional


class FunctionalTransport(Transport):
    """What ``transport`` makes, for torch.compile: one graph for all ranks, whose calls nothing watches."""

    def __init__(self, transport: Transport, can: Capabilities) -> None:
        self.group, self.size, self.members = transport.group, transport.size, transport.members
        self.index, self.position = transport.index, transport.position
        self._exchanges, self._can, self._native = can.exchanges(self.members), can, C10dTransport.native
        self._name = transport.process_group.group_name

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return self.start_all_reduce(x, op, donate)()

    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        if reduced_here(x, op, self._can):
            return lambda: reduced(self._rows(x), op)
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
        if x.dtype not in self._native or reduced_here(x, "sum", self._can) or not x.numel():
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
