"""Ranks as threads of one process, one running at a time. Also the smallest complete backend. The world's condition
is a baton: a rank has it while it runs Python and passes it on only inside a collective, with torch's random state.
So a run is deterministic, and a deadlock is found at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..backend.interface import Backend, Capabilities
from ..comm.signature import Call, call_place, disagreement
from ..comm.transport import Primitive
from ..comm.wrapper import TransportWrapper
from ..errors import BackendError, CollectiveMismatchError, PeerLostError
from ..layout.mesh import Group, Mesh
from ..runtime.context import ParallelContext, use
from ..runtime.init import whole_tensors_only

T = TypeVar("T")
_Entry = tuple[Call, Tensor]


class ThreadWorld:
    """The state that the threads share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.baton = threading.Condition()
        self.waiting: dict[int, Call] = {}
        self.ended: dict[int, BaseException | None] = {}
        self._boxes: dict[tuple[tuple[int, ...], int], dict[int, _Entry]] = {}
        self._seq: Counter[tuple[tuple[int, ...], int]] = Counter()

    def exchange(self, members: tuple[int, ...], rank: int, op: str, x: Tensor) -> list[Tensor]:
        """Every member's tensor, in group order, once all members have made the same call."""
        seq = self._seq[members, rank]
        self._seq[members, rank] += 1
        call = Call.of(seq, op, x.shape, x.dtype, call_place())
        box = self._boxes.setdefault((members, seq), {})
        # a copy: this rank may go on and change x before the others wake up and read it
        box[rank] = (call, x.detach().clone(memory_format=torch.contiguous_format))
        if len(box) == len(members):
            self._boxes.pop((members, seq))
            for member in members:  # they may not be awake yet, but they wait for no rank any more
                self.waiting.pop(member, None)
            self.baton.notify_all()
        else:
            self._wait(rank, call, members, box)
        calls = [box[r][0] for r in members]
        if any(theirs != calls[0] for theirs in calls):
            raise CollectiveMismatchError(disagreement(calls, members))
        return [box[r][1] for r in members]

    def _wait(self, rank: int, call: Call, members: tuple[int, ...], box: dict[int, _Entry]) -> None:
        state = torch.get_rng_state()
        self.waiting[rank] = call
        try:
            while len(box) < len(members):
                self._raise_if_hopeless(rank, call, [r for r in members if r not in box])
                self.baton.wait()
        finally:
            self.waiting.pop(rank, None)
            torch.set_rng_state(state)

    def _raise_if_hopeless(self, rank: int, call: Call, missing: list[int]) -> None:
        failed = [(r, e) for r, e in self.ended.items() if e is not None and not isinstance(e, PeerLostError)]
        if failed:
            lost, error = failed[0]
            raise PeerLostError(f"rank {lost} failed with {type(error).__name__}: {error}; rank {rank} was at {call}")
        left = [r for r in missing if r in self.ended]
        if left:
            raise PeerLostError(f"rank {left[0]} has finished, but rank {rank} waits for it at {call}")
        if len(self.waiting) + len(self.ended) == self.size:
            self.baton.notify_all()
            lines = "\n".join(f"  rank {r}: {c}" for r, c in sorted(self.waiting.items()))
            raise BackendError(f"deadlock: every rank waits for another\n{lines}")

    def end(self, rank: int, error: BaseException | None) -> None:
        self.ended[rank] = error
        self.baton.notify_all()


class ThreadTransport(TransportWrapper):
    """Computes every primitive from its ``meaning``: the tensors of all ranks are in this process."""

    compares = True

    def __init__(self, group: Group, rank: int, world: ThreadWorld) -> None:
        super().__init__(group, rank)
        self._world, self._rank = world, rank

    def exchange(self, call: str, x: Tensor) -> list[Tensor]:
        """Every member's tensor, in group order."""
        return self._world.exchange(self.members, self._rank, call, x)

    def relay(self, primitive: Primitive, x: Tensor, *arguments: Any) -> Tensor:
        every = self.exchange(primitive.describe(*arguments), x)
        # a copy: all ranks share the memory of the exchanged tensors
        out: Tensor = primitive.meaning(every, self.index, *arguments)
        return out.clone(memory_format=torch.contiguous_format)


class ThreadBackend(Backend):
    interface = 2
    transport_class = ThreadTransport
    capabilities = Capabilities(
        dtypes=(*Capabilities.dtypes, torch.int16, torch.int8), moved=(torch.complex64, torch.complex128)
    )

    def __init__(self, rank: int, world: ThreadWorld) -> None:
        self._rank, self._world = rank, world

    def start(self, timeout: float) -> tuple[int, int]:
        return self._rank, self._world.size

    def connect(self, group: Group, rank: int) -> ThreadTransport:
        return ThreadTransport(group, rank, self._world)

    def device(self) -> torch.device:
        return torch.device("cpu")


def run_ranks(
    mesh: Mesh, fn: Callable[[ParallelContext], T], *, backend: type[ThreadBackend] = ThreadBackend
) -> list[T]:
    """Call ``fn(ctx)`` on every rank of ``mesh``; return the results in rank order. Every rank starts from the
    caller's random state. If ranks fail, the first failure that is not a consequence of another is raised."""
    world = ThreadWorld(mesh.size)
    results: dict[int, T] = {}
    state = torch.get_rng_state()

    def one(rank: int) -> None:
        error: BaseException | None = None
        with world.baton:
            torch.set_rng_state(state)
            try:
                with use(ParallelContext(backend(rank, world), mesh, rank)) as ctx:
                    results[rank] = fn(ctx)
            except BaseException as e:  # noqa: BLE001  raised in the caller's thread below
                error = e
            finally:
                world.end(rank, error)

    threads = [
        threading.Thread(target=copy_context().run, args=(one, r), name=f"rank {r}", daemon=True)
        for r in range(mesh.size)
    ]
    with whole_tensors_only():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    torch.set_rng_state(state)
    errors = [e for e in world.ended.values() if e is not None]  # in the order in which the ranks ended
    for e in sorted(errors, key=lambda e: isinstance(e, PeerLostError)):
        raise e
    return [results[r] for r in range(mesh.size)]
