"""Collectives over one group, as layers call them. Arguments are checked; a group of one sends nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from ..errors import refuse_forked
from ..private import recorded
from .order import InOrder
from .transport import Op, Pending, Transport
from .wrapper import Checked, Operators


@final
class Comm:
    """Out-of-place collectives bound to one group, without autograd: of any dim, negative ones too, any strides, and
    zero-size tensors. Inputs stay unchanged (unless ``donate``) and outputs are contiguous. A group of one returns its
    input.

    ``position`` is this rank's place in the group, as a one-element int64 tensor on the backend's device.
    Python control flow must never depend on it, so that a compiling backend builds one graph for all ranks.
    """

    def __init__(self, transport: Transport, sums: Mapping[str, frozenset[torch.dtype]]) -> None:
        """``sums``: the dtypes that each reduction ("sum", "max") takes."""
        alone = transport.size == 1
        unchecked = alone or transport.compares or not transport.eager
        self.transport = transport if unchecked else Checked(transport)
        self.group, self.size, self.position = transport.group, transport.size, transport.position
        self.eager, self.reads_are_cheap = transport.eager, transport.reads_are_cheap
        self.device_type = transport.position.device.type  # asking the tensor takes 0.4 us, in each layer
        self._pid, self._rank = os.getpid(), transport.members[transport.index]
        self.padded: set[int] = set()
        """Widths of the padded parts that layers on this group make: a loss must know their true size."""
        self.layers = 0
        """How many layers this process has made on the group."""
        self.entrance = 0
        """The number of the layer that was called first: what it gets comes from the program, not from other layers."""
        self.compared: Counter[Hashable] = Counter()
        """How often the members have compared what they get from their programs, of each kind."""
        self.blocks: int | None = None
        """How many of the parts in which ``in_order`` divides sums a rank adds; 0 where they cannot be divided so."""
        self._sums = sums
        self._graphs = transport.in_graphs
        self.called("")

    def called(self, name: str) -> Comm:
        """Set the name by which ``ParallelContext.named`` finds this Comm; return it."""
        self.name = name
        # used where a graph is made, which cannot follow a collective into its library
        self.operators = self._graphs or Operators(self.group, self.size, name)
        return self

    def in_order(self, most: int | None) -> Comm:
        """Let sums have the same bits in groups of any power of two of ranks up to ``most``, if each rank gives the sum
        in one tree (``order.tree``) of ``blocks`` parts. None: as it is. Return it."""
        if most is not None:
            self.blocks = most // self.size if most % self.size == 0 else 0
            if self.size > 2:  # two numbers have one sum
                self.transport = InOrder(self.transport)
        return self

    @property
    def _active(self) -> Transport:
        if recorded():
            return self.operators
        if os.getpid() != self._pid:
            refuse_forked(self._pid, self._rank)
        return self.transport

    def __deepcopy__(self, memo: object) -> Comm:
        return self  # a copied model talks over the same group

    def __reduce__(self) -> str:
        raise TypeError(
            f"{type(self).__name__} over {self.group.axes} is a live connection and cannot be pickled: "
            "tpcore.checkpoint.save writes the state of its model, and copy.deepcopy copies it"
        )

    def all_reduce(self, x: Tensor, op: Op = "sum", *, donate: bool = False) -> Tensor:
        """Sum or maximum over the group. With ``donate`` the result may use the memory of ``x``, and the
        caller must not use ``x`` again: this saves a copy of a fresh temporary."""
        if self.size == 1:
            return x
        self._check_sums(x, op)
        return self._active.all_reduce(x, op, donate)

    def start_all_reduce(self, x: Tensor, op: Op = "sum", *, donate: bool = False) -> Pending:
        """Begin an all-reduce so that local work can overlap with it; call the result to wait."""
        if self.size == 1:
            return lambda: x
        self._check_sums(x, op)
        return self._active.start_all_reduce(x, op, donate)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The members' chunks, concatenated along ``dim`` in rank order. All have the same shape."""
        dim = _positive(x, dim)
        return x if self.size == 1 else self._active.all_gather(x, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's chunk along ``dim`` of the sum over the group."""
        dim = self._divided(x, dim)
        return x if self.size == 1 else self._active.reduce_scatter(x, dim)

    def start_reduce_scatter(self, x: Tensor, dim: int, *, donate: bool = False) -> Pending:
        """Begin a reduce-scatter; call the result to wait. With ``donate`` the caller must not use ``x`` again."""
        dim = self._divided(x, dim)
        return (lambda: x) if self.size == 1 else self._active.start_reduce_scatter(x, dim, donate)

    def _divided(self, x: Tensor, dim: int) -> int:
        """``dim``, not negative. ValueError for a sum that the group cannot divide along it."""
        self.chunk(x, dim := _positive(x, dim))
        if self.size > 1:
            self._check_sums(x, "sum")
        return dim

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """The ``x`` of the member at position ``src`` of the group."""
        if not 0 <= src < self.size:
            raise ValueError(f"no member {src} in a group {self.group.axes} of size {self.size}")
        return x if self.size == 1 else self._active.broadcast(x, src)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        """Send chunk ``i`` of ``x`` along ``split_dim`` to member ``i``, and concatenate the received chunks
        along ``concat_dim`` in rank order."""
        split_dim, concat_dim = _positive(x, split_dim), _positive(x, concat_dim)
        self.chunk(x, split_dim)
        return x if self.size == 1 else self._active.all_to_all(x, split_dim, concat_dim)

    def permute(self, x: Tensor, to: Sequence[int | None]) -> Tensor:
        """Send ``x`` of member ``i`` to member ``to[i]``; None or -1: nowhere. Who receives nothing gets zeros."""
        targets = self._targets(to)
        if self.size == 1:
            return x if 0 in targets else torch.zeros_like(x)
        return self._active.permute(x, targets)

    def start_permute(self, x: Tensor, to: Sequence[int | None]) -> Pending:
        """Begin a ``permute`` so that local work can overlap with it; call the result to wait."""
        if self.size == 1:
            out = self.permute(x, to)
            return lambda: out
        return self._active.start_permute(x, self._targets(to))

    def _targets(self, to: Sequence[int | None]) -> tuple[int, ...]:
        targets = tuple(-1 if t is None else int(t) for t in to)
        used = [t for t in targets if t != -1]
        if len(targets) != self.size or len(set(used)) != len(used) or not set(used) <= {*range(self.size)}:
            raise ValueError(
                f"to={tuple(to)} does not send from each of the {self.size} members of {self.group.axes} to "
                f"another: give {self.size} different positions, or None for who sends nothing"
            )
        return targets

    def split(self, x: Tensor, dim: int) -> Tensor:
        """This rank's chunk of ``x``, selected with the tensor ``position``."""
        dim = _positive(x, dim)
        n = self.chunk(x, dim)
        if self.size == 1:
            return x
        return x.index_select(dim, self.position * n + torch.arange(n, device=x.device))

    def chunk(self, x: Tensor, dim: int) -> int:
        """Length of one rank's chunk of ``x`` along ``dim``."""
        if x.shape[dim] % self.size:
            raise ValueError(
                f"cannot split dim {dim} of shape {tuple(x.shape)} over {self.group.axes} of size {self.size}: not "
                f"divisible; pad it (a sequence, for instance) to a multiple of {self.size}"
            )
        return x.shape[dim] // self.size

    @contextmanager
    def traced(self, position: Tensor, transport: Transport | None = None) -> Iterator[None]:
        """While a graph is traced: ``position`` is an input of it, and ``transport`` (None: the present one) makes
        the calls."""
        saved = self.position, self.transport
        self.position, self.transport = position, transport or self.transport.at(position)
        try:
            yield
        finally:
            self.position, self.transport = saved

    @property
    def process_group(self) -> Any:
        """The backend's own handle of this group; for c10d backends a ``torch.distributed.ProcessGroup``."""
        return self.transport.process_group

    @property
    def rank(self) -> NoReturn:
        """Refused: ``if comm.rank == 0`` would cut a lazy backend's graph, or give each rank its own."""
        raise AttributeError(
            "a Comm has no rank: comm.position, its place in the group, is a tensor, as graphs need it; "
            "for file names and logs use ctx.rank, an int"
        )

    def _check_sums(self, x: Tensor, op: Op) -> None:
        if x.dtype not in self._sums.get(op, ()):
            raise ValueError(
                f"cannot take the {op} of {x.dtype} over ranks: convert it to a wider dtype first"
                if op in self._sums
                else f"no reduction {op!r}; there are {', '.join(self._sums)}"
            )


def _positive(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"no dim {dim} in a tensor of shape {tuple(x.shape)}")
    return dim % x.ndim
