"""The backend: a job over torch.distributed whose transport is gloo or shared memory."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tpcore.backend.interface import Dims, Function, LoadedProgram
from tpcore.c10d.backend import C10dBackend
from tpcore.c10d.supervision.host import RANK_MEMORY, available_memory, let_threads_finish, sockets
from tpcore.c10d.supervision.waiting import Waiting
from tpcore.c10d.transport import C10dTransport
from tpcore.comm.transport import CPU, Pending, Transport
from tpcore.layout.mesh import Group
from tpcore.log import inform
from tpcore.private import backend_of, gather_flat
from tpcore.runtime.context import current
from tpcore.settings import Variable, changed, one_of

from .exchange import Exchange
from .segment import shared
from .shared_memory import SharedTransport

INTERFACE = Variable("GLOO_SOCKET_IFNAME", str, "")
SHM = Variable("TPCORE_SHM", one_of({"1": True, "0": False}), True)
INDUCTOR = Variable("TPCORE_INDUCTOR", one_of({"1": True, "0": False}), False)


class GlooTransport(C10dTransport):
    """The collectives of a torch.distributed group. They call its gloo object directly: the dispatcher and
    torch.distributed's wrappers cost more than our layers (7 to 15 us a call)."""

    why = "alone"
    """The reason why the group does not use shared memory."""

    def __repr__(self) -> str:
        return f"gloo ({self.why})"

    def _handle(self, pg: Any) -> Any:
        return backend_of(pg, CPU)

    def _started_scatter(self, sent: Tensor, x: Tensor, dim: int) -> Pending:
        """All-to-all, then a local sum: half the traffic of gloo's reduce-scatter, which all-reduces.
        Measured with 4 ranks on 4 MB: 4.2 ms, against 12.1 for gloo's and 9.4 for all-reduce and narrow."""
        self._enter("reduce_scatter", x, dim)
        parts = self._started_exchange(sent)
        return lambda: parts().sum(0, dtype=x.dtype)


def exchanged(pg: Any, waiting: Waiting, text: str) -> list[str]:
    """Gather the members' texts, of up to 255 bytes each."""
    size = len(waiting.members)
    sent = torch.frombuffer(bytearray(text.encode()[:255].ljust(256, b"\0")), dtype=torch.uint8)
    texts = torch.empty(256 * size, dtype=torch.uint8)
    waiting.finish(gather_flat(backend_of(pg, CPU), texts, sent))
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in texts.view(size, 256)]


class GlooBackend(C10dBackend):
    """Ranks are processes on CPUs. ``C10dBackend`` reports lost ranks and calls that differ."""

    transport = "gloo"
    transport_class = GlooTransport
    library = (os.path.dirname(__file__) + os.sep,)
    capabilities = replace(
        C10dBackend.capabilities,
        moved=(torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn),
        tracing=torch.__version__ >= "2.9",  # the oldest torch whose torch.export is tested
    )

    buffers: ClassVar[tuple[int, int]] = (1 << 16, 1 << 22)
    """Bytes of a buffer in shared memory: at first, and at most. Larger tensors are sent in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[Any, Exchange | str] = {}

    def start(self, timeout: float) -> tuple[int, int]:
        # the last handler runs first: the supervision registers its own later, which cuts the connections, so
        # that no thread of gloo waits for another rank any more
        atexit.unregister(_release_tensors)
        atexit.register(_release_tensors)
        return super().start(timeout)

    def _close(self, error: BaseException | None) -> None:
        super()._close(error)
        for shared_or_why in self._shared.values():
            if isinstance(shared_or_why, Exchange):
                shared_or_why.close()
        self._shared.clear()

    @classmethod
    def remark(cls) -> str:
        """Which groups take shared memory here. A member that cannot is known only once the group is made."""
        buffers_or_why = shared(1, 0, cls.buffers, lambda text: [text], _refusal())
        if isinstance(buffers_or_why, list):
            return f"all groups exchange tensors over gloo, none through shared memory: {buffers_or_why[0]}"
        buffers_or_why.close()
        return "groups of ranks on one host exchange tensors through shared memory, other groups over gloo"

    def device(self) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def most_ranks(cls) -> int | None:
        memory = available_memory()
        return None if memory is None else max(1, memory // RANK_MEMORY)

    def trace(
        self, fn: Function, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], dims: Dims, folder: Path
    ) -> None:
        from . import programs  # torch.export takes a second to import

        ctx = current()
        programs.trace(fn, weights, inputs, dims, ctx.comms, ctx.world, folder, inductor=INDUCTOR.get())

    def load_program(self, folder: Path, weights: Mapping[str, Tensor]) -> LoadedProgram:
        from . import programs

        return programs.load(folder, weights, current().named)

    def _compares(self, pg: Any, waiting: Waiting) -> bool:
        self._shared[pg] = self._share_memory(pg, waiting)
        return isinstance(self._shared[pg], Exchange)

    def _made_over(self, group: Group, pg: Callable[[], Any], watch: Waiting | None) -> Transport:
        shared_or_why = GlooTransport.why if watch is None else self._shared[pg()]
        if isinstance(shared_or_why, Exchange):
            return SharedTransport(group, self._rank, pg, shared_or_why)
        transport = super()._made_over(group, pg, watch)
        transport.why = shared_or_why  # type: ignore[attr-defined]
        return transport

    def _share_memory(self, pg: Any, waiting: Waiting) -> Exchange | str:
        """Set up memory that all members share; return the reason if they cannot. Collective."""
        members, neighbours = waiting.members, waiting.neighbours
        if not neighbours.issuperset(members):
            return "not all on one host"
        gather = partial(exchanged, pg, waiting)
        buffers_or_why = shared(len(members), members.index(self._rank), self.buffers, gather, _refusal())
        if not isinstance(buffers_or_why, list):
            return Exchange(buffers_or_why, waiting, len(neighbours))
        why = "; ".join(f"rank {r}: {text}" for r, text in zip(members, buffers_or_why, strict=True) if text)
        if self._rank == members[0] and SHM.name not in why:
            inform(f"ranks {list(members)} talk over gloo, since they cannot share memory: {why}")
        return why

    def _sockets(self) -> frozenset[int]:
        return sockets()

    def _alone(self) -> AbstractContextManager[None]:
        """Let gloo listen on the loopback interface: a group of one needs no port that others can reach."""
        local = [i for _, i in socket.if_nameindex() if i in ("lo", "lo0")]
        return changed({INTERFACE.name: local[0]} if local and not INTERFACE.is_set else {})


def _release_tensors() -> None:
    """Let gloo's threads release the last collectives' tensors, for which they need the interpreter's lock: CPython
    before 3.14 ends a thread that asks for that of an interpreter that ends, and so aborts the process."""
    let_threads_finish("pt_gloo_runloop", 1.0)


def _refusal() -> str:
    return "" if SHM.get() else f"{SHM.name}=0"
