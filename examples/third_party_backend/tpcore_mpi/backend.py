"""tpcore over MPI: tensors travel as bytes, and sums are taken here."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tpcore.backend import Backend, Capabilities
from tpcore.comm import Transport
from tpcore.comm.transport import Op
from tpcore.layout import Group


class MPITransport(Transport):
    """``handle``: an mpi4py communicator of this rank's group, in the group's order."""

    def __init__(self, group: Group, rank: int, handle: Any) -> None:
        super().__init__(group, rank)
        self._handle = handle

    @property
    def process_group(self) -> Any:
        return self._handle

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        shape = (*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :])
        return self._gathered(x).movedim(0, dim).contiguous().view(shape)

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        every = self._gathered(x)  # in one order on every rank, so that all get the same bits
        return every.sum(0, dtype=x.dtype) if op == "sum" else every.amax(0)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self._exchanged(x, dim).sum(0, dtype=x.dtype)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        out = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        self._handle.Bcast(_bytes(out), root=src)
        return out

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        chunks = self._exchanged(x, split_dim).movedim(0, concat_dim)
        return chunks.flatten(concat_dim, concat_dim + 1).contiguous()

    def _gathered(self, x: Tensor) -> Tensor:
        """Everyone's tensor, one after the other in a new first dim."""
        x = x.detach().resolve_conj().resolve_neg().contiguous()
        out = x.new_empty((self.size, *x.shape))
        self._handle.Allgather(_bytes(x), _bytes(out))
        return out

    def _exchanged(self, x: Tensor, dim: int) -> Tensor:
        """Everyone's chunk for this rank, one after the other in a new first dim."""
        sent = (
            x.detach()
            .resolve_conj()
            .resolve_neg()
            .unflatten(dim, (self.size, x.shape[dim] // self.size))
            .movedim(dim, 0)
            .contiguous()
        )
        received = torch.empty_like(sent)
        self._handle.Alltoall(_bytes(sent), _bytes(received))
        return received


class MPIBackend(Backend):
    interface = 2
    transport_class = MPITransport
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

    def connect(self, group: Group, rank: int) -> MPITransport:
        members = group.members(rank)
        if group.size == 1:
            return MPITransport(group, rank, _alone())
        handle = self._world.Split(color=group.partition.index(members), key=members.index(rank))
        self._made.append(handle)
        return MPITransport(group, rank, handle)

    def adopt(self, process_group: Any) -> MPITransport:
        rank = self._world.Get_rank()
        return MPITransport(Group(("user",), (tuple(process_group.allgather(rank)),)), rank, process_group)

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
    """The memory of a contiguous tensor, as MPI takes it: every dtype is bytes. A dim of size 1 may have any stride."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()
