"""tpcore over MPI: tensors travel as bytes, and sums are taken here."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tpcore import Backend, Capabilities, Comm, Group
from tpcore.comm import Op


class MPIComm(Comm):
    """``handle``: an mpi4py communicator of this rank's group, in the group's order."""

    def __init__(self, group: Group, position: int, handle: Any) -> None:
        super().__init__(group, torch.tensor([position]))
        self._handle = handle

    @property
    def process_group(self) -> Any:
        return self._handle

    def _gathered(self, x: Tensor) -> Tensor:
        """Everyone's tensor, one after the other in a new first dim."""
        x = x.detach().contiguous()
        out = x.new_empty((self.size, *x.shape))
        self._handle.Allgather(_bytes(x), _bytes(out))
        return out

    def _all_gather(self, x: Tensor, dim: int) -> Tensor:
        shape = (*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :])
        return self._gathered(x).movedim(0, dim).contiguous().view(shape)

    def _all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        _check(x)
        every = self._gathered(x)  # in one order on every rank, so that all get the same bits
        return every.sum(0, dtype=x.dtype) if op == "sum" else every.amax(0)

    def _reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        _check(x)
        n = self.chunk(x, dim)
        parts = x.detach().reshape(*x.shape[:dim], self.size, n, *x.shape[dim + 1 :])
        sent = parts.movedim(dim, 0).contiguous()
        got = torch.empty_like(sent)
        self._handle.Alltoall(_bytes(sent), _bytes(got))
        return got.sum(0, dtype=x.dtype)

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        self._handle.Bcast(_bytes(out), root=src)
        return out


class MPIBackend(Backend):
    interface = 1
    comm_class = MPIComm
    capabilities = Capabilities(moved=(torch.complex64,))

    @classmethod
    def unavailable(cls) -> str | None:
        # asked, not imported: importing mpi4py.MPI starts MPI
        return None if find_spec("mpi4py") else "mpi4py is not installed: pip install mpi4py"

    def start(self, timeout: float) -> tuple[int, int]:
        from mpi4py import MPI  # ends MPI when the process ends

        self._world = MPI.COMM_WORLD
        self._made: list[Any] = []
        return self._world.Get_rank(), self._world.Get_size()

    def comm(self, group: Group, rank: int) -> MPIComm:
        members = group.members(rank)
        position = members.index(rank)
        if group.size == 1:
            return MPIComm(group, 0, _alone())
        handle = self._world.Split(color=group.partition.index(members), key=position)
        self._made.append(handle)
        return MPIComm(group, position, handle)

    def comm_of(self, process_group: Any) -> MPIComm:
        ranks = tuple(process_group.allgather(self._world.Get_rank()))
        return MPIComm(Group(("user",), (ranks,)), process_group.Get_rank(), process_group)

    def device(self) -> torch.device:
        return torch.device("cpu")

    def stop(self) -> None:
        if sys.exc_info()[1] is not None and self._world.Get_size() > 1:
            return  # others may still be in a collective: freeing, which is one as well, would wait for them
        for handle in self._made:
            handle.Free()
        self._made.clear()


def _alone() -> Any:
    from mpi4py import MPI

    return MPI.COMM_SELF


def _bytes(x: Tensor) -> Any:
    """The memory of a contiguous tensor, as MPI takes it: every dtype is bytes."""
    return x.view(-1).view(torch.uint8).numpy()


def _check(x: Tensor) -> None:
    if x.dtype not in MPIBackend.capabilities.dtypes and not x.dtype.is_complex:
        raise ValueError(f"cannot reduce {x.dtype} over ranks: convert it to a wider dtype first")
