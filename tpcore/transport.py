"""What a backend writes for one group, and the one table of the primitives that it is made of."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .mesh import Group

Op = Literal["sum", "max"]
Pending = Callable[[], Tensor]
"""A collective under way: call it once to wait for the result."""
Shape = tuple[int, ...]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Primitive:
    """One collective, as a graph, a recording, a checker, ``explain`` and the conformance kit know it.

    The method of this name of ``Transport`` is its default, or abstract; that of ``Comm`` checks arguments.
    """

    name: str
    arguments: Mapping[str, str]
    """What it takes beside the tensor, in order: name and type, as torch writes schemas."""
    describe: Callable[..., str]
    """From the arguments: ``all_gather dim 1``. Ranks that are to meet describe their calls alike."""
    meaning: Callable[..., Tensor]
    """From every member's tensor, one's place in the group and the arguments: what that one gets."""
    sent: Callable[[int, int], int]
    """Bytes that each rank sends at the least, in a ring: from those that it gives and the group's size."""
    transpose: Callable[..., Tensor]
    """From a Comm, a cotangent and the arguments: the transpose of the linear map over all ranks."""
    shape: Callable[..., Shape] | None = None
    """From the shape given, the group's size and the arguments: the shape returned. None: the same."""
    divides: str = ""
    """The argument that names the dim which the group's size must divide, if there is one."""
    sums: bool = False
    """Whether it computes, so that it takes only dtypes that the backend declares for sums."""

    def result(self, x: Tensor, size: int, *arguments: Any) -> Tensor:
        """A tensor like what comes of ``x``, without its values."""
        return x.new_empty(x.shape if self.shape is None else self.shape(x.shape, size, *arguments))


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _longer(shape: Shape, n: int, dim: int) -> Shape:
    return _resized(shape, dim, shape[dim] * n)


def _shorter(shape: Shape, n: int, dim: int) -> Shape:
    return _resized(shape, dim, shape[dim] // n)


def _combined(every: Sequence[Tensor], op: str) -> Tensor:
    """One after the other, in their own dtype: a wire does not sum bfloat16 more precisely than that."""
    return reduce(torch.add, every) if op == "sum" else torch.stack(list(every)).amax(0)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """torch.cat, which does not take every dtype that can be moved."""
    if parts[0].dtype.itemsize > 1:
        return torch.cat(list(parts), dim)
    return torch.cat([t.view(torch.uint8) for t in parts], dim).view(parts[0].dtype)


def _delivered(every: Sequence[Tensor], me: int, to: Sequence[int]) -> Tensor:
    return every[to.index(me)] if me in to else torch.zeros_like(every[me])


def inverse(to: Sequence[int]) -> tuple[int, ...]:
    """Who sends to each member, -1 for nobody: as a permutation, the way back."""
    return tuple(to.index(i) if i in to else -1 for i in range(len(to)))


ALL_GATHER = Primitive(
    "all_gather",
    {"dim": "int"},
    "all_gather dim {}".format,
    meaning=lambda every, me, dim: _joined(every, dim),
    sent=lambda nbytes, n: (n - 1) * nbytes,
    transpose=lambda comm, y, dim: comm.reduce_scatter(y, dim),
    shape=_longer,
)
ALL_REDUCE = Primitive(
    "all_reduce",
    {"op": "str", "donate": "bool"},
    "all_reduce {}".format,
    meaning=lambda every, me, op, donate: _combined(every, op),
    sent=lambda nbytes, n: 2 * (n - 1) * nbytes // n,
    transpose=lambda comm, y, op, donate: comm.all_reduce(y),
    sums=True,
)
REDUCE_SCATTER = Primitive(
    "reduce_scatter",
    {"dim": "int"},
    "reduce_scatter dim {}".format,
    meaning=lambda every, me, dim: _combined(every, "sum").chunk(len(every), dim)[me],
    sent=lambda nbytes, n: (n - 1) * nbytes // n,
    transpose=lambda comm, y, dim: comm.all_gather(y, dim),
    shape=_shorter,
    divides="dim",
    sums=True,
)
BROADCAST = Primitive(
    "broadcast",
    {"src": "int"},
    "broadcast from {}".format,
    meaning=lambda every, me, src: every[src],
    sent=lambda nbytes, n: nbytes,
    transpose=lambda comm, y, src: torch.where(comm.position == src, comm.all_reduce(y), 0),
)
ALL_TO_ALL = Primitive(
    "all_to_all",
    {"split_dim": "int", "concat_dim": "int"},
    "all_to_all dim {} to {}".format,
    meaning=lambda every, me, split, concat: _joined([t.chunk(len(every), split)[me] for t in every], concat),
    sent=lambda nbytes, n: (n - 1) * nbytes // n,
    transpose=lambda comm, y, split_dim, concat_dim: comm.all_to_all(y, concat_dim, split_dim),
    shape=lambda shape, n, split_dim, concat_dim: _longer(_shorter(shape, n, split_dim), n, concat_dim),
    divides="split_dim",
)
PERMUTE = Primitive(
    "permute",
    {"to": "int[]"},
    "permute to {}".format,
    meaning=_delivered,
    sent=lambda nbytes, n: nbytes,
    transpose=lambda comm, y, to: comm.permute(y, inverse(to)),
)
TABLE = (ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL, PERMUTE)
PRIMITIVES: Mapping[str, Primitive] = {p.name: p for p in TABLE}


class Transport(ABC):
    """Collectives over one group, as a backend makes them; ``Comm`` checks the arguments before.

    The contract: a group has more than one member; a dim exists and is not negative; what is to be cut
    divides. Tensors have any strides, zero elements or no dims. Inputs are left as they were, unless they
    are donated; outputs are new memory, contiguous, and outside of autograd. What is moved and not summed
    arrives bit for bit, NaN too. Every rank of a group gets the same bits of a sum.
    """

    eager: ClassVar[bool] = True
    """Whether reading a value on the host is cheap. False for lazy backends: there it cuts the graph."""
    compares: ClassVar[bool] = False
    """Whether it finds out itself that ranks make different calls, so that ``Comm`` need not compare them."""

    def __init__(self, group: Group, rank: int, device: torch.device = CPU) -> None:
        self.group, self.size, self.members = group, group.size, group.members(rank)
        self.index = self.members.index(rank)  # host-side: whom to send to, never what to compute
        # one element and moved: torch_xla folds 0-d zeros and ones, and fills, into the program
        self.position = torch.tensor([self.index]).to(device)

    def __repr__(self) -> str:
        """How tensors travel, as the context tells it."""
        return type(self).__name__

    @property
    def process_group(self) -> Any:
        """The backend's own handle of this group; for c10d backends a ``torch.distributed.ProcessGroup``."""
        return self

    def at(self, position: Tensor) -> Transport:
        """The same with another position, such as an input of a graph."""
        other = copy.copy(self)
        other.position = position
        return other

    @abstractmethod
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        """Sum or maximum over the group. With ``donate`` the result may use the memory of ``x``."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The members' tensors, concatenated along ``dim`` in the group's order."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This member's chunk along ``dim`` of the sum over the group."""

    # -- what a backend may write, to be faster ---------------------------------------------------------
    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        """The same as ``all_reduce``, under way."""
        out = self.all_reduce(x, op, donate)
        return lambda: out

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """``x`` of the member ``src``."""
        # where, not a product: 0 * nan is nan
        return self.all_reduce(torch.where(self.position == src, x, torch.zeros_like(x)), "sum", True)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        """Chunk ``i`` of ``x`` along ``split_dim`` goes to member ``i``; what comes is concatenated along
        ``concat_dim`` in the group's order."""
        n = x.shape[split_dim] // self.size
        mine = self.position * n + torch.arange(n, device=x.device)
        every = self.all_gather(x.unsqueeze(0), 0).index_select(split_dim + 1, mine)
        return every.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1).contiguous()

    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        """``x`` of member ``i`` goes to member ``to[i]``, or nowhere if that is -1; who receives nothing gets
        zeros."""
        sources = torch.tensor(inverse(to)).to(self.position.device).index_select(0, self.position)
        found = self.all_gather(x.unsqueeze(0), 0).index_select(0, sources.clamp(min=0))[0]
        if -1 not in inverse(to):
            return found
        return torch.where(sources >= 0, found, torch.zeros_like(found)).reshape(x.shape)
