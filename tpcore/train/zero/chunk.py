"""One rank's chunk of each parameter: the flat local part is divided over dp into equal ones, the last padded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...comm.comm import Comm
from ...comm.transport import CPU, Pending
from ...layout.slices import Share, narrowed
from ...private import accumulation_hooks
from ...runtime.context import current
from ...runtime.gradients import check_sums, sum_in_tree
from ..clip import Addend, Parts, shares_of
from ..data_parallel import Bucket, buckets, present_anywhere

ReadRun = Callable[[int, Tensor], None]
"""Fills a flat tensor in host memory with the entries of a stored one from that number on, row by row."""


def kind_of(parameter: Tensor) -> str:
    """A description of everything that must not change once the optimizer has state."""
    return f"{parameter.numel()} entries, {parameter.dtype} on {parameter.device}"


class ParameterChunk:
    """The base optimizer steps ``value`` and its ``grad``: 1/dp of the parameter's entries.

    The tensor ``dp.position`` selects the entries, so that all ranks run one program. Without a master dtype
    the values are cut from the parameter for each step and freed after it. Master values are kept, because
    they have bits that the parameter's dtype cannot represent.
    """

    def __init__(self, parameter: Tensor, dp: Comm, master_dtype: torch.dtype | None) -> None:
        self.parameter, self.dp = parameter, dp
        self.numel, self.kind = parameter.numel(), kind_of(parameter)
        self.length = -(-self.numel // dp.size)
        wide = torch.promote_types(parameter.dtype, master_dtype or parameter.dtype)
        self.has_master = wide != parameter.dtype
        # allocated now for optimizers that make their state in the constructor, as Adagrad does
        self.value = nn.Parameter(torch.empty(self.length, dtype=wide, device=parameter.device))
        self._filled = False  # with master values
        self.value.tpcore_chunk = weakref.ref(self)  # type: ignore[attr-defined]

    def rows(self, full: Tensor) -> Tensor:
        """A tensor of the parameter's shape as one row for each dp rank."""
        flat, room = full.reshape(-1), self.length * self.dp.size
        return (flat if room == self.numel else F.pad(flat, (0, room - self.numel))).view(self.dp.size, -1)

    def cut(self, full: Tensor) -> Tensor:
        """This rank's entries of a tensor of the parameter's shape, in memory of their own."""
        # on the host by its index: a lazy device would compile a program for each shape
        index = (
            self.dp.position
            if full.device == self.dp.position.device
            else torch.tensor([current().index(self.dp)], device=full.device)
        )
        return self.rows(full).index_select(0, index).view(-1)

    def read(self, run: ReadRun, dtype: torch.dtype) -> Tensor:
        """The same of a tensor in a file, in host memory. Only these entries are read."""
        out, start = torch.zeros(self.length, dtype=dtype), current().index(self.dp) * self.length
        run(start, out[: max(0, self.numel - start)])
        return out

    def whole(self, part: Tensor) -> Tensor:
        """Gather a tensor of the parameter's shape from the dp ranks' chunks. Collective over dp."""
        rows = self.dp.all_gather(part.unsqueeze(0), 0)
        return rows.reshape(-1)[: self.numel].view(self.parameter.shape)

    def gradient(self) -> Tensor | None:
        """The whole mean gradient of the parameter's local shard. Collective over dp."""
        return None if self.value.grad is None else self.whole(self.value.grad)

    def fill(self) -> None:
        """Set ``value`` from the parameter, which a checkpoint may have changed since the last step. A master value
        stays if it still rounds to the parameter's value."""
        values = self.cut(self.parameter.detach())
        if self.has_master:
            master, wide = self.value.detach(), values.to(self.value.dtype)
            values = torch.where(values == master.to(values.dtype), master, wide) if self._filled else wide
        self.value.data = values
        self._filled = self.has_master

    def take_master(self, values: Tensor | None) -> None:
        """Set the master values from a saved state; None: they will start from the weights."""
        self._filled = values is not None and self.has_master
        if values is not None and self._filled:
            self.value.data = values.to(self.value.device, self.value.dtype)

    @property
    def master(self) -> Tensor | None:
        return self.value.detach() if self._filled else None

    def take_gradient(self, start: int, part: Tensor) -> None:
        """Set the mean gradient of the entries from ``start`` on to ``part``."""
        if len(part) == self.length:
            self.value.grad = part.to(self.value.dtype)
            return
        if start == 0:
            self.value.grad = torch.empty_like(self.value)
        if self.value.grad is not None:
            self.value.grad[start : start + len(part)].copy_(part)

    def put(self, start: int, rows: Tensor) -> None:
        """Write the entries of all ranks' chunks from ``start`` on into the parameter."""
        target = self.parameter.detach()
        if self.divisible:
            target.view(self.dp.size, self.length)[:, start : start + rows.shape[1]].copy_(rows)
        else:
            target.copy_(rows.reshape(-1)[: self.numel].view(target.shape))

    def free(self) -> None:
        """Free the gradient, and the values unless they are master values."""
        self.value.grad = None
        if not self._filled:
            self.value.data = self.value.detach()[:0].clone()

    @property
    def divisible(self) -> bool:
        """Whether rows are views of the parameter's memory."""
        return self.length * self.dp.size == self.numel and self.parameter.is_contiguous()

    def segments(self, itemsize: int, most: int) -> Iterator[ChunkSegment]:
        """The chunk in segments. The same segment of all ranks together has up to ``most`` bytes."""
        step = max(1, most // (self.dp.size * itemsize)) if self.divisible else self.length
        for start in range(0, self.length, step):
            yield ChunkSegment(self, start, min(step, self.length - start))

    def addend(self, p: float) -> Addend:
        """This rank's share of a norm, which is summed over dp afterwards."""
        grad, (comm, shares) = self.value.grad, shares_of(self.parameter)
        return Addend(self.parameter.dtype, comm, [] if grad is None else self._parts(grad, shares, p))

    def _parts(self, grad: Tensor, shares: Sequence[Share], p: float) -> Parts:
        if len(shares) <= 1:
            return [(grad, shares[0].copies if shares else 1)]
        # blocks with different numbers of copies: each entry is weighted by its number
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        weight = torch.ones(self.parameter.shape, dtype=wide.dtype, device=grad.device)
        for share in shares:
            narrowed(weight, share.start, share.size).fill_(share.copies ** (-1 / p))
        return [(wide * self.cut(weight), 1)]


def chunk_of(value: Tensor) -> ParameterChunk | None:
    """The chunk whose value a base optimizer steps; None for a parameter."""
    made = getattr(value, "tpcore_chunk", None)
    return None if made is None else made()


class ChunkSegment(NamedTuple):
    """``length`` entries of a chunk from ``start`` on."""

    chunk: ParameterChunk
    start: int
    length: int

    def of_value(self) -> Tensor:
        """This rank's values, in the parameter's dtype."""
        value = self.chunk.value.detach().narrow(0, self.start, self.length)
        return value.to(self.chunk.parameter.dtype)


class Accumulation:
    """With a ``dtype``, sums the gradients of several backwards in it, and frees ``.grad`` at once."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        most = current().reproducible
        if dtype is not None and most is not None:
            raise ValueError(
                f"grad_dtype={dtype} adds the gradients of several backwards one by one, and reproducible={most} in a "
                "tree, in the dtype of the parameters: leave it out"
            )
        self._dtype = dtype
        self._sums: dict[Tensor, Tensor] = {}
        self._handles: dict[Tensor, int] = {}

    @property
    def sums(self) -> bool:
        """Whether gradients are summed elsewhere than in ``.grad``."""
        return self._dtype is not None

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients of these parameters from now on. A move to another device loses the hook: call it again."""
        parameters = list(parameters)
        sum_in_tree(parameters)
        for p in parameters if self._dtype is not None else ():
            if p.requires_grad and self._handles.get(p) not in accumulation_hooks(p):
                # a reference that keeps no optimizer alive
                self._handles[p] = p.register_post_accumulate_grad_hook(partial(_add, weakref.ref(self))).id

    def add(self, p: Tensor) -> None:
        if p.grad is None or self._dtype is None:
            return
        grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
        if p in self._sums:
            self._sums[p].add_(grad)
        else:
            self._sums[p] = grad.to(self._dtype, copy=True)
        p.grad = None

    def of(self, p: Tensor) -> Tensor | None:
        self.add(p)  # a gradient that was set by hand, or before the hook
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()  # the ranks' sparse gradients have different rows
        return self._sums.get(p, p.grad)

    def dtype_of(self, p: Tensor) -> torch.dtype:
        return self._dtype or p.dtype

    def drop(self, p: Tensor) -> None:
        self._sums.pop(p, None)
        p.grad = None


def _add(sums: weakref.ref[Accumulation], p: Tensor) -> None:
    if (accumulation := sums()) is not None:
        accumulation.add(p)


Segments = list[ChunkSegment]


def in_buckets(
    chunks: Iterable[ParameterChunk], dtype_of: Callable[[Tensor], torch.dtype], most: int
) -> list[Segments]:
    """Buckets of segments of the chunks. ``dtype_of``: the dtype to send for a parameter."""

    def kind(segment: ChunkSegment) -> tuple[Comm, torch.dtype]:
        return segment.chunk.dp, dtype_of(segment.chunk.parameter)

    segments = (s for chunk in chunks for s in chunk.segments(dtype_of(chunk.parameter).itemsize, most))
    return buckets(segments, kind, lambda s: s.length * s.chunk.dp.size * kind(s)[1].itemsize, most)


class Reduction:
    """Takes the mean of ``gradients`` over ``dp``. ``most``: bytes in one bucket."""

    def __init__(self, gradients: Accumulation, dp: Comm, most: int) -> None:
        self._gradients, self._dp, self._most = gradients, dp, most
        self._stepped: set[ParameterChunk] = set()

    def buckets(self, chunks: Sequence[ParameterChunk]) -> list[Bucket]:
        """The buckets that a collective reduces, in the order in which backward ends them."""
        last_first = [chunk for chunk in reversed(chunks) if chunk.dp.size > 1]
        return [
            Bucket(
                [*dict.fromkeys(s.chunk.parameter for s in segments)],
                self._gradients.of,
                partial(self._begin, segments),
                partial(self._put, segments),
            )
            for segments in in_buckets(last_first, self._gradients.dtype_of, self._most)
        ]

    def run(self, chunks: Sequence[ParameterChunk], under_way: Sequence[Bucket]) -> list[ParameterChunk]:
        """Give ``chunks`` their gradients, and free those of the parameters. ``under_way``: buckets that are started.
        Returns the chunks that have a gradient on any dp rank, filled with their values."""
        check_sums(chunk.parameter for chunk in chunks)
        device = chunks[0].parameter.device if chunks else CPU
        has = [self._gradients.of(chunk.parameter) is not None for chunk in chunks]
        has += [bucket.changed() for bucket in under_way]
        anywhere = present_anywhere(has, self._dp, device)
        stepped = [chunk for chunk, somewhere in zip(chunks, anywhere, strict=False) if somewhere]
        self._stepped = set(stepped)
        for chunk in stepped:
            chunk.fill()
        for bucket, again in zip(under_way, anywhere[len(chunks) :], strict=True):
            bucket.finish(again)
        done = {p for bucket in under_way for p in bucket.parameters}
        late = [chunk for chunk in reversed(stepped) if chunk.parameter not in done]
        for segments in in_buckets(late, self._gradients.dtype_of, self._most):
            self._put(segments, self._begin(segments)())
        return stepped

    def _begin(self, segments: Segments) -> Pending:
        rows = [s.chunk.rows(self._gradient(s.chunk.parameter)).narrow(1, s.start, s.length) for s in segments]
        dp = segments[0].chunk.dp
        return dp.start_reduce_scatter(torch.cat(rows, 1).div_(dp.size), 0, donate=True)

    def _put(self, segments: Segments, rows: Tensor) -> None:
        for segment, part in zip(segments, rows.view(-1).split([s.length for s in segments]), strict=True):
            if segment.chunk in self._stepped:  # a bucket under way has zeros for the others
                segment.chunk.take_gradient(segment.start, part)
            if segment.start + segment.length == segment.chunk.length:  # the last one
                self._gradients.drop(segment.chunk.parameter)

    def _gradient(self, p: Tensor) -> Tensor:
        """The gradient of ``p``; zeros if only another dp rank has one."""
        gradient = self._gradients.of(p)
        return torch.zeros_like(p, dtype=self._gradients.dtype_of(p)) if gradient is None else gradient
