"""The mean of gradients over dp, of which each rank gets its chunks: one reduce-scatter for each bucket of segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from ...comm.comm import Comm, Pending
from ...comm.transport import CPU
from ..buckets import buckets
from ..data_parallel import present_anywhere
from ..overlap import Bucket
from .accumulation import Accumulation
from .chunk import ChunkSegment, ParameterChunk

Segments = list[ChunkSegment]


def in_buckets(
    chunks: Iterable[ParameterChunk], dtype_of: Callable[[Tensor], torch.dtype], most: int
) -> Iterable[Segments]:
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
        place = {chunk: i for i, chunk in enumerate(last_first)}
        made = in_buckets(last_first, self._gradients.dtype_of, self._most)
        return [
            Bucket(
                [*dict.fromkeys(s.chunk.parameter for s in some)],
                self._gradients.of,
                partial(self._begin, some),
                partial(self._put, some),
            )
            for some in sorted(made, key=lambda some: place[some[-1].chunk])
        ]

    def run(
        self,
        chunks: Sequence[ParameterChunk],
        under_way: Sequence[Bucket],
        check: Callable[[list[ParameterChunk]], None],
    ) -> list[ParameterChunk]:
        """Give ``chunks`` their gradients, and free those of the parameters. ``under_way``: buckets that are started.
        Returns the chunks that have a gradient on any dp rank, filled with their values. ``check``: of these chunks,
        before anything changes."""
        device = chunks[0].parameter.device if chunks else CPU
        has = [
            *(self._gradients.of(chunk.parameter) is not None for chunk in chunks),
            *(b.changed() for b in under_way),
        ]
        anywhere = present_anywhere(has, self._dp, device)
        stepped = [chunk for chunk, somewhere in zip(chunks, anywhere, strict=False) if somewhere]
        check(stepped)
        self._stepped = set(stepped)
        for chunk in stepped:
            chunk.fill()
        for bucket, again in zip(under_way, anywhere[len(chunks) :], strict=True):
            bucket.finish(again)
        done = {p for bucket in under_way for p in bucket.parameters}
        late = [chunk for chunk in reversed(stepped) if chunk.parameter not in done]
        for some in in_buckets(late, self._gradients.dtype_of, self._most):
            self._put(some, self._begin(some)())
        return stepped

    def _begin(self, some: Segments) -> Pending:
        rows = torch.cat([s.of_rows(self._gradient(s.chunk.parameter)) for s in some], 1)
        return some[0].chunk.dp.start_reduce_scatter(rows.div_(self._dp.size), 0, donate=True)

    def _put(self, some: Segments, rows: Tensor) -> None:
        for segment, part in zip(some, rows.view(-1).split([s.length for s in some]), strict=True):
            if segment.chunk in self._stepped:  # a bucket under way has zeros for the others
                segment.chunk.take_gradient(segment.start, part)
            if segment.last:
                self._gradients.drop(segment.chunk.parameter)

    def _gradient(self, p: Tensor) -> Tensor:
        """The gradient of ``p``; zeros if only another dp rank has one."""
        found = self._gradients.of(p)
        return torch.zeros_like(p, dtype=self._gradients.dtype_of(p)) if found is None else found
