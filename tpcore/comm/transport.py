"""The transport that a backend writes for a group, and the table of the collective primitives."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..layout.mesh import Group

Op = Literal["sum", "max"]
Pending = Callable[[], Tensor]
"""A collective under way: call it once to wait for the result."""
Shape = tuple[int, ...]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Primitive:
    """One collective, described for graphs, recordings, checks and the conformance kit.

    ``Transport`` has a method of this name, abstract or with a default; the one of ``Comm`` checks arguments.
    """

    name: str
    arguments: Mapping[str, str]
    """The arguments after the tensor, in order: name and type, as torch writes schemas."""
    describe: Callable[..., str]
    """(arguments) -> a description: ``all_gather dim 1``. It is equal on ranks that make the same call."""
    meaning: Callable[..., Tensor]
    """(tensors of all members, one member's position, arguments) -> the result on that member."""
    sent: Callable[[int, int], int]
    """(bytes of the input, group size) -> the least number of bytes that each rank sends, in a ring."""
    transpose: Callable[..., Tensor]
    """(Comm, cotangent, arguments) -> the transpose of the linear map over all ranks."""
    shape: Callable[..., Shape] | None = None
    """(input shape, group size, arguments) -> the shape of the result. None: the same shape."""
    divides: str = ""
    """The argument that names the dim which the group size must divide, if there is one."""
    sums: bool = False
    """Whether it sums, so that it takes only dtypes that the backend declares for sums."""

    def result(self, x: Tensor, size: int, *arguments: Any) -> Tensor:
        """An empty tensor of the result's shape and dtype for ``x``."""
        return x.new_empty(x.shape if self.shape is None else self.shape(x.shape, size, *arguments))


def _longer(shape: Shape, n: int, dim: int) -> Shape:
    return (*shape[:dim], shape[dim] * n, *shape[dim + 1 :])


def _shorter(shape: Shape, n: int, dim: int) -> Shape:
    return (*shape[:dim], shape[dim] // n, *shape[dim + 1 :])


def _combined(tensors: Sequence[Tensor], op: str) -> Tensor:
    """Summed in order and in their own dtype: a network does not sum bfloat16 more precisely."""
    return reduce(torch.add, tensors) if op == "sum" else torch.stack(list(tensors)).amax(0)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """torch.cat, also for one-byte dtypes that torch.cat refuses."""
    if parts[0].dtype.itemsize > 1:
        return torch.cat(list(parts), dim)
    return torch.cat([t.view(torch.uint8) for t in parts], dim).view(parts[0].dtype)


def inverse(to: Sequence[int]) -> tuple[int, ...]:
    """The sender to each member, -1 for none. As a permutation it is the inverse of ``to``."""
    return tuple(to.index(i) if i in to else -1 for i in range(len(to)))


ALL_GATHER = Primitive(
    "all_gather",
    {"dim": "int"},
    "all_gather dim {}".format,
    meaning=lambda tensors, me, dim: _joined(tensors, dim),
    sent=lambda nbytes, n: (n - 1) * nbytes,
    transpose=lambda comm, y, dim: comm.reduce_scatter(y, dim),
    shape=_longer,
)
ALL_REDUCE = Primitive(
    "all_reduce",
    {"op": "str", "donate": "bool"},
    "all_reduce {}".format,
    meaning=lambda tensors, me, op, donate: _combined(tensors, op),
    sent=lambda nbytes, n: 2 * (n - 1) * nbytes // n,
    transpose=lambda comm, y, op, donate: comm.all_reduce(y),
    sums=True,
)
REDUCE_SCATTER = Primitive(
    "reduce_scatter",
    {"dim": "int"},
    "reduce_scatter dim {}".format,
    meaning=lambda tensors, me, dim: _combined(tensors, "sum").chunk(len(tensors), dim)[me],
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
    meaning=lambda tensors, me, src: tensors[src],
    sent=lambda nbytes, n: nbytes,
    transpose=lambda comm, y, src: torch.where(comm.position == src, comm.all_reduce(y), 0),
)
ALL_TO_ALL = Primitive(
    "all_to_all",
    {"split_dim": "int", "concat_dim": "int"},
    "all_to_all dim {} to {}".format,
    meaning=lambda tensors, me, split, concat: _joined([t.chunk(len(tensors), split)[me] for t in tensors], concat),
    sent=lambda nbytes, n: (n - 1) * nbytes // n,
    transpose=lambda comm, y, split_dim, concat_dim: comm.all_to_all(y, concat_dim, split_dim),
    shape=lambda shape, n, split_dim, concat_dim: _longer(_shorter(shape, n, split_dim), n, concat_dim),
    divides="split_dim",
)
PERMUTE = Primitive(
    "permute",
    {"to": "int[]"},
    "permute to {}".format,
    meaning=lambda tensors, me, to: tensors[to.index(me)] if me in to else torch.zeros_like(tensors[me]),
    sent=lambda nbytes, n: nbytes,
    transpose=lambda comm, y, to: comm.permute(y, inverse(to)),
)
TABLE = (ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL, PERMUTE)
PRIMITIVES: Mapping[str, Primitive] = {p.name: p for p in TABLE}


def as_stored(x: Tensor) -> Tensor:
    """Outside of autograd, and not conjugated or negated lazily: its memory has its numbers."""
    x = x.detach() if x.requires_grad else x
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


class Transport(ABC):
    """Collectives over one group, written by a backend. ``Comm`` has checked the arguments.

    The contract: a group has more than one member; dims exist and are not negative; sizes to split are divisible.
    Tensors may have any strides, zero elements or no dims, and be conjugated or negated lazily. Inputs stay unchanged
    unless donated, and the caller may change them as soon as a method, one that starts too, has returned. Outputs have
    the input's dtype; they are the caller's own memory, contiguous, and outside of autograd: no later call writes to
    them. Values that are moved and not summed arrive bit for bit, NaN too; a library that cannot keep the sign of zero,
    as XLA, says so in ``loses`` of its conformance test. A sum rounds to the nearest number, denormal ones too. Every
    rank of a group gets the same bits of a sum or maximum. All of this holds at every size, and at every call. Every
    rank that waits for a lost one gets ``PeerLostError`` or ``CollectiveTimeoutError``, from each method.
    """

    eager: ClassVar[bool] = True
    """Whether Python may branch on values. False for lazy backends, where a read cuts the graph."""
    compares: ClassVar[bool] = False
    """Whether the transport itself detects ranks that make different calls, so that ``Comm`` need not."""

    in_graphs: Transport | None = None
    """What makes the calls in graphs of torch.compile. None: operators of tpcore's."""

    def __init__(self, group: Group, rank: int, device: torch.device = CPU) -> None:
        self.group, self.size, self.members = group, group.size, group.members(rank)
        self.index = self.members.index(rank)  # host-side: for addressing, never in a computation
        # one element, moved to the device: torch_xla folds 0-d zeros and ones, and fills, into the program
        self.position = torch.tensor([self.index], device="cpu").to(device)

    def __repr__(self) -> str:
        """How tensors travel: part of the context's repr."""
        return type(self).__name__

    @property
    def reads_are_cheap(self) -> bool:
        """Whether the host reads a value without a wait for a device: what runs in every step reads only then."""
        return self.eager and self.position.device.type == "cpu"

    @property
    def process_group(self) -> Any:
        """The backend's own handle of this group; for c10d backends a ``torch.distributed.ProcessGroup``."""
        return self

    def at(self, position: Tensor) -> Transport:
        """This transport with another position, such as an input of a graph."""
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

    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        """Start an ``all_reduce``; call the result to wait for it."""
        out = self.all_reduce(x, op, donate)
        return lambda: out

    def start_reduce_scatter(self, x: Tensor, dim: int, donate: bool) -> Pending:
        """Start a ``reduce_scatter``; call the result to wait for it. With ``donate`` it may read ``x`` until then."""
        out = self.reduce_scatter(x, dim)
        return lambda: out

    def start_permute(self, x: Tensor, to: tuple[int, ...]) -> Pending:
        """Start a ``permute``; call the result to wait for it."""
        out = self.permute(x, to)
        return lambda: out

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """The ``x`` of member ``src``."""
        # not a sum with zeros: that loses the sign of zero and takes only dtypes that the backend sums
        return self.all_gather(x.unsqueeze(0), 0)[src].clone()

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        """Send chunk ``i`` of ``x`` along ``split_dim`` to member ``i``, and concatenate the received chunks
        along ``concat_dim`` in the group's order."""
        n = x.shape[split_dim] // self.size
        local = self.position * n + torch.arange(n, device=x.device)
        chunks = self.all_gather(x.unsqueeze(0), 0).index_select(split_dim + 1, local)
        return chunks.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1).contiguous()

    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        """Send ``x`` of member ``i`` to member ``to[i]``, or nowhere if that is -1. Who receives nothing gets zeros."""
        sources = torch.tensor(inverse(to), device="cpu").to(self.position.device).index_select(0, self.position)
        output = self.all_gather(x.unsqueeze(0), 0).index_select(0, sources.clamp(min=0))[0]
        if -1 not in inverse(to):
            return output
        return torch.where(sources >= 0, output, torch.zeros_like(output)).reshape(x.shape)
