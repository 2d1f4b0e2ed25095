"""The collectives of one group whose ranks are all on one host, through shared memory. Sums are taken in rank order
on every rank, for half precision in float32 and rounded once: the same bits on all ranks, however a tensor is sharded
into pieces. A rank must not use it from several threads at once: a group's collectives have one order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpcore.c10d.transport import copied
from tpcore.comm.signature import Call, place_of, word_of
from tpcore.comm.transport import PRIMITIVES, Op, Pending, Transport, as_stored, inverse
from tpcore.layout.mesh import Group

from .exchange import Announced, Exchange

Fold = Callable[..., Tensor]
Tile = tuple[slice, slice]
_HALF = (torch.float16, torch.bfloat16)
_FOLD: dict[str, Fold] = {"sum": torch.add, "max": torch.maximum}
_KEPT = 256  # cached plans
_TWO_STEPS = 1 << 16  # above this many bytes, with more than two ranks, each rank sums one part
_Piece = tuple[Tile, list[Tensor]]


def folded(parts: list[Tensor], fold: Fold, out: Tensor | None = None) -> Tensor:
    """The parts combined in rank order, into ``out``. Half precision is summed in float32, rounded once."""
    if len(parts) > 2 and parts[0].dtype in _HALF and fold is torch.add:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        return total.to(parts[0].dtype) if out is None else out.copy_(total)
    total = fold(parts[0], parts[1], out=out)
    for part in parts[2:]:
        fold(total, part, out=total)
    return total


def tiles(rows: int, columns: int, most: int) -> Iterator[Tile]:
    """Tiles of a matrix of at most ``most`` elements, whole rows if they fit. An empty matrix has one."""
    wide = max(1, min(columns, most))
    high = max(1, most // wide)
    for r in range(0, max(1, rows), high):
        for c in range(0, max(1, columns), wide):
            yield slice(r, min(r + high, rows)), slice(c, min(c + wide, columns))


class _Plan(NamedTuple):
    """Cached data of calls with the same arguments, shape and dtype. ``views``: [buffer][rank], a buffer as a tensor
    of this shape; None if the buffer is too small."""

    name: str
    word: int
    views: list[list[Tensor]] | None


class SharedTransport(Transport):
    """``pg`` returns the torch.distributed group of the same ranks, for code that uses it directly."""

    compares = True

    def __init__(self, group: Group, rank: int, pg: Callable[[], Any], exchange: Exchange) -> None:
        super().__init__(group, rank)
        self._pg, self._exchange, self._segment = pg, exchange, exchange.segment
        self._plans, self._note = exchange.plans, exchange.waiting.note
        self._places = exchange.waiting.places

    def __repr__(self) -> str:
        return "shared memory"

    @property
    def process_group(self) -> Any:
        return self._pg()

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        x, plan, call = self._begin("all_reduce", x, op)
        if plan.views is None:
            return self._summed_by_pieces(x, op, donate, call)
        parts = plan.views[self._exchange.next_buffer()]
        parts[self.index].copy_(x)
        self._exchange.meet(call)
        if self.size == 2 and x.is_contiguous():
            first, second = (x, parts[1]) if self.index == 0 else (parts[0], x)
            return _FOLD[op](first, second, out=x if donate else None)
        return folded(parts, _FOLD[op], x if donate and x.is_contiguous() else None)

    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        """What fits a buffer is visible at once. The sum is computed at the wait, or before the next collective."""
        x, plan, call = self._begin("all_reduce", x, op)
        if plan.views is None:
            out = self._summed_by_pieces(x, op, donate, call)
            return lambda: out
        parts = plan.views[self._exchange.next_buffer()]
        parts[self.index].copy_(x)
        return self._posted(call, lambda: folded(parts, _FOLD[op]))

    def _summed_by_pieces(self, x: Tensor, op: Op, donate: bool, call: Announced) -> Tensor:
        in_place = donate and x.is_contiguous()
        out = x if in_place else torch.empty_like(x, memory_format=torch.contiguous_format)
        source, target = x.contiguous().view(1, -1), out.view(1, -1)
        for at, every in self._pieces(call, source):
            if self.size == 2:
                every[self.index] = source[at]
                folded(every, _FOLD[op], target[at])
            else:
                self._summed_in_two_steps(every, source[at], _FOLD[op], target[at], call)
        return out

    def _summed_in_two_steps(self, every: list[Tensor], x: Tensor, fold: Fold, out: Tensor, call: Announced) -> None:
        """Each rank sums one part into its own buffer, from which all others copy it."""
        n = x.shape[1]
        cuts = [slice(n * p // self.size, n * (p + 1) // self.size) for p in range(self.size)]
        here = cuts[self.index]
        parts = [t[:, here] for t in every]
        local, parts[self.index] = parts[self.index], x[:, here]
        folded(parts, fold, local)
        self._exchange.meet(call)
        for cut, t in zip(cuts, every, strict=True):
            out[:, cut].copy_(t[:, cut])

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        x, plan, call = self._begin("all_gather", x, dim)
        if plan.views is not None and x.dtype.itemsize > 1:  # torch.cat refuses some one-byte dtypes
            parts = plan.views[self._exchange.next_buffer()]
            parts[self.index].copy_(x)
            self._exchange.meet(call)
            return torch.cat(parts, dim)
        out = PRIMITIVES["all_gather"].result(x, self.size, dim)
        targets = self._chunks(out, dim)
        for at, every in self._pieces(call, x.reshape(targets.shape[1:])):
            for target, part in zip(targets, every, strict=True):
                target[at].copy_(part)
        return out

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        x, _, call = self._begin("reduce_scatter", x, dim)
        out = PRIMITIVES["reduce_scatter"].result(x, self.size, dim)
        source = self._chunks(x, dim)
        target = out.view(source.shape[1:])
        for at, every in self._pieces(call, source):
            folded([t[self.index] for t in every], torch.add, target[at])
        return out

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        x, _, call = self._begin("broadcast", x, src)
        out = copied(x) if src == self.index else x.new_empty(x.shape)
        flat = out.view(1, -1)
        for at, every in self._pieces(call, flat, src == self.index):
            if src != self.index:
                flat[at].copy_(every[src])
        return out

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        x, _, call = self._begin("all_to_all", x, split_dim, concat_dim)
        chunk = (*x.shape[:split_dim], x.shape[split_dim] // self.size, *x.shape[split_dim + 1 :])
        source = self._chunks(x, split_dim)
        received = x.new_empty(source.shape)
        for at, every in self._pieces(call, source):
            for target, part in zip(received, every, strict=True):
                target[at].copy_(part[self.index])
        return received.view(self.size, *chunk).movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1).contiguous()

    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        x, _, call = self._begin("permute", x, to)
        return self._permuted_by_pieces(x, to, call)

    def start_permute(self, x: Tensor, to: tuple[int, ...]) -> Pending:
        """Visible to its receiver at once, which copies it at the wait, or before the next collective."""
        x, _, call = self._begin("permute", x, to)
        if x.nbytes > self._exchange.room(x.nbytes, call, whole=True):
            out = self._permuted_by_pieces(x, to, call)
            return lambda: out
        every, sender = self._next_buffer(x.dtype, x.shape), inverse(to)[self.index]
        if to[self.index] >= 0:
            every[self.index].copy_(x)
        return self._posted(call, lambda: every[sender].clone() if sender >= 0 else torch.zeros_like(every[self.index]))

    def _permuted_by_pieces(self, x: Tensor, to: tuple[int, ...], call: Announced) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        source, sender = x.contiguous().view(1, -1), inverse(to)[self.index]
        target = out.view(1, -1)
        for at, every in self._pieces(call, source, to[self.index] >= 0):
            if sender >= 0:
                target[at].copy_(every[sender])
        return out if sender >= 0 else out.zero_()

    def _posted(self, call: Announced, result: Callable[[], Tensor]) -> Pending:
        """Post ``call``, which is completed once: at the wait, or before the next collective."""
        exchange, done = self._exchange, list[Tensor | BaseException]()

        def complete() -> Tensor:
            if not done:
                exchange.pending = None
                try:
                    exchange.take(call)
                    done.append(result())
                except BaseException as e:  # noqa: BLE001  every wait raises it, since the group goes on after one
                    done.append(e)
            if isinstance(done[0], BaseException):
                raise done[0]
            return done[0]

        exchange.post(call)
        exchange.pending = complete
        return complete

    def _begin(self, primitive: str, x: Tensor, *arguments: Any) -> tuple[Tensor, _Plan, Announced]:
        key = primitive, arguments, x.shape, x.dtype
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(primitive, x, arguments)
        entry = self._note(plan.name, x)
        word = word_of(Call.of(*entry[1:]).key(True)) if self._places else plan.word
        site = entry[-1]
        return as_stored(x), plan, (word, 0 if site is None else place_of(plan.name, site), entry)

    def _plan(self, primitive: str, x: Tensor, arguments: tuple[Any, ...]) -> _Plan:
        segment, n = self._segment, x.numel()
        if len(self._plans) >= _KEPT:
            self._plans.clear()
        limit = min(segment.room, segment.most)
        if primitive == "all_reduce" and self.size > 2:
            limit = min(limit, _TWO_STEPS)
        views = None
        if n * x.element_size() <= limit:
            with torch.inference_mode(False):  # inference tensors cannot be written outside of it
                views = [[t[:n].view(x.shape) for t in b] for b in segment.buffers(x.dtype)]
        name = PRIMITIVES[primitive].describe(*arguments)
        return _Plan(name, word_of((name, tuple(x.shape), x.dtype)), views)

    def _pieces(self, call: Announced, source: Tensor, sends: bool = True) -> Iterator[_Piece]:
        """Exchange ``source``, a matrix or one for each member, in pieces that fit a buffer, at least one: rows and
        columns, and what each rank has sent of them. ``sends``: whether this rank has anything to send."""
        *lead, rows, columns = source.shape
        room = self._exchange.room(source.nbytes, call) // source.element_size()
        for at in tiles(rows, columns, room // math.prod(lead)):
            piece = source[..., at[0], at[1]]
            every = self._next_buffer(source.dtype, piece.shape)
            if sends:
                every[self.index].copy_(piece)
            self._exchange.meet(call)
            yield at, every

    def _next_buffer(self, dtype: torch.dtype, shape: Sequence[int]) -> list[Tensor]:
        """The buffer to fill now of each rank, as a tensor of ``shape``."""
        every = self._segment.buffers(dtype)[self._exchange.next_buffer()]
        with torch.inference_mode(False):
            return [t[: math.prod(shape)].view(tuple(shape)) for t in every]

    def _chunks(self, x: Tensor, dim: int) -> Tensor:
        """The members' chunks of ``x``, each as a matrix."""
        before, after = math.prod(x.shape[:dim]), math.prod(x.shape[dim:])
        return x.reshape(before, self.size, after // self.size).movedim(1, 0)
