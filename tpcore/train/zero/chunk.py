"""One rank's chunk of a parameter: the flat local shard is cut over dp into equal chunks, the last padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...comm.comm import Comm
from ...layout.slices import Share, narrowed
from ...runtime.context import current
from ..clip import Addend, Parts, shares_of

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
        self._filled = False

    # -- the cut ------------------------------------------------------------------------------------------
    def rows(self, full: Tensor) -> Tensor:
        """A tensor of the parameter's shape as one row for each dp rank."""
        flat, room = full.reshape(-1), self.length * self.dp.size
        return (flat if room == self.numel else F.pad(flat, (0, room - self.numel))).view(self.dp.size, -1)

    def cut(self, full: Tensor) -> Tensor:
        """This rank's entries of a tensor of the parameter's shape."""
        return self.rows(full).index_select(0, self.dp.position).view(-1)

    @property
    def _start(self) -> int:
        """The first of this rank's entries; host-side only."""
        return current().index(self.dp) * self.length

    def cut_on_host(self, full: Tensor) -> Tensor:
        """Like ``cut``, for a tensor in host memory: a lazy device would compile a program for each shape."""
        part = full.reshape(-1)[self._start : self._start + self.length]
        return F.pad(part, (0, self.length - part.numel())).clone()

    def read_on_host(self, read: ReadRun, dtype: torch.dtype) -> Tensor:
        """The same for a tensor in a file. Only these entries are read."""
        out = torch.zeros(self.length, dtype=dtype)
        read(self._start, out[: max(0, self.numel - self._start)])
        return out

    def whole(self, part: Tensor) -> Tensor:
        """Gather a tensor of the parameter's shape from the dp ranks' chunks. Collective over dp."""
        rows = self.dp.all_gather(part.unsqueeze(0), 0)
        return rows.reshape(-1)[: self.numel].view(self.parameter.shape)

    # -- a step -------------------------------------------------------------------------------------------
    def fill(self) -> None:
        """Set ``value`` from the parameter, which a checkpoint may have changed since the last step. A master value
        stays if it still rounds to the parameter's value."""
        now = self.cut(self.parameter.detach())
        if self.has_master:
            master, now_wide = self.value.detach(), now.to(self.value.dtype)
            now = torch.where(now == master.to(now.dtype), master, now_wide) if self._filled else now_wide
        self.value.data = now
        self._filled = True

    def take_master(self, values: Tensor | None) -> None:
        """Set the master values from a saved state; None: they will start from the weights."""
        self._filled = values is not None and self.has_master
        if values is not None and self.has_master:
            self.value.data = values.to(self.value.device, self.value.dtype)

    @property
    def master(self) -> Tensor | None:
        return self.value.detach() if self.has_master and self._filled else None

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
        if not (self.has_master and self._filled):
            self.value.data = self.value.detach()[:0].clone()

    # -- in buckets ---------------------------------------------------------------------------------------
    @property
    def divisible(self) -> bool:
        """Whether rows are views of the parameter's memory."""
        return self.length * self.dp.size == self.numel and self.parameter.is_contiguous()

    def segments(self, itemsize: int, most: int) -> Iterator[ChunkSegment]:
        """The chunk in segments. The same segment of all ranks together has up to ``most`` bytes."""
        step = max(1, most // (self.dp.size * itemsize)) if self.divisible else self.length
        for start in range(0, self.length, step):
            yield ChunkSegment(self, start, min(step, self.length - start))

    # -- the norm -----------------------------------------------------------------------------------------
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


class ChunkSegment:
    """``length`` entries of a chunk from ``start`` on."""

    def __init__(self, chunk: ParameterChunk, start: int, length: int) -> None:
        self.chunk, self.start, self.length = chunk, start, length

    @property
    def last(self) -> bool:
        return self.start + self.length == self.chunk.length

    def of_rows(self, full: Tensor) -> Tensor:
        """This segment of all ranks, cut from a tensor of the parameter's shape."""
        return self.chunk.rows(full).narrow(1, self.start, self.length)

    def of_value(self) -> Tensor:
        """This rank's values, in the parameter's dtype."""
        value = self.chunk.value.detach().narrow(0, self.start, self.length)
        return value.to(self.chunk.parameter.dtype)
