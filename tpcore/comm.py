"""Collectives over one group: the whole surface a backend must implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from .mesh import Group

Op = Literal["sum", "max"]
Pending = Callable[[], Tensor]
"""A collective under way: call it once to wait for the result."""


class Comm(ABC):
    """Out-of-place collectives bound to one group. No autograd, no policy, no globals.

    Contract, the same for every backend: any dim, negative ones too, any strides, zero-size tensors;
    inputs are left as they were (unless ``donate``) and outputs are contiguous.

    ``position``, this rank's place in the group, is data: a one-element int64 tensor on the backend's device.
    Python control flow must never depend on it, so that a compiling backend builds one graph for all ranks.
    """

    eager = True
    """Whether reading a value on the host is cheap. False for lazy backends: there it cuts the graph."""

    def __init__(self, group: Group, position: Tensor) -> None:
        self.group = group
        self.size = group.size
        self.position = position

    def __deepcopy__(self, memo: object) -> Comm:
        return self  # a copied model talks over the same group

    def __reduce__(self) -> str:
        raise TypeError(
            f"{type(self).__name__} over {self.group.axes} is a live connection and cannot be pickled: "
            "save model.state_dict() (tpcore.parallel_layers.save) instead of the model"
        )

    def all_reduce(self, x: Tensor, op: Op = "sum", *, donate: bool = False) -> Tensor:
        """Sum or maximum over the group. With ``donate`` the caller gives ``x`` up and the result may use
        its memory: for a fresh temporary that saves a copy."""
        return x if self.size == 1 else self._all_reduce(x, op, donate)

    def start_all_reduce(self, x: Tensor, op: Op = "sum", *, donate: bool = False) -> Pending:
        """Begin an all-reduce so that local work can overlap with it; call the result to wait."""
        if self.size == 1:
            return lambda: x
        return self._start_all_reduce(x, op, donate)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The group's chunks, concatenated along ``dim`` in rank order. All have one shape."""
        dim = _positive(x, dim)
        return x if self.size == 1 else self._all_gather(x, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum over the group, of which this rank keeps its chunk along ``dim``."""
        dim = _positive(x, dim)
        self.chunk(x, dim)
        return x if self.size == 1 else self._reduce_scatter(x, dim)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """``x`` of the member at position ``src`` of the group."""
        if not 0 <= src < self.size:
            raise ValueError(f"no member {src} in a group {self.group.axes} of size {self.size}")
        return x if self.size == 1 else self._broadcast(x, src)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """This rank's chunk of ``x``, selected by data."""
        dim = _positive(x, dim)
        n = self.chunk(x, dim)
        if self.size == 1:
            return x
        return x.index_select(dim, self.position * n + torch.arange(n, device=x.device))

    def chunk(self, x: Tensor, dim: int) -> int:
        """Length of one rank's chunk of ``x`` along ``dim``."""
        if x.shape[dim] % self.size:
            raise ValueError(
                f"cannot split dim {dim} of shape {tuple(x.shape)} over "
                f"{self.group.axes} of size {self.size}: not divisible"
            )
        return x.shape[dim] // self.size

    @contextmanager
    def position_as(self, position: Tensor) -> Iterator[None]:
        """Substitute the position, so that a tracer can make it a graph input."""
        saved, self.position = self.position, position
        try:
            yield
        finally:
            self.position = saved

    @property
    def rank(self) -> NoReturn:
        """Not there: ``if comm.rank == 0`` cuts the graph of a lazy backend, or gives each rank its own."""
        raise AttributeError(
            "a Comm has no rank: comm.position, its place in the group, is a tensor, as graphs need it; "
            "for file names and logs use ctx.rank, an int"
        )

    @property
    @abstractmethod
    def process_group(self) -> Any:
        """The backend's own handle of this group; for c10d backends a ``torch.distributed.ProcessGroup``."""

    # -- what a backend writes: called with size > 1 and 0 <= dim < x.ndim ------------------------------
    @abstractmethod
    def _all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, x: Tensor, dim: int) -> Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor, dim: int) -> Tensor: ...

    # -- what it may write, to be faster ----------------------------------------------------------------
    def _start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        out = self._all_reduce(x, op, donate)
        return lambda: out

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        # where, not a product: 0 * nan is nan
        return self._all_reduce(torch.where(self.position == src, x, torch.zeros_like(x)), "sum", True)


def _positive(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"no dim {dim} in a tensor of shape {tuple(x.shape)}")
    return dim % x.ndim
