"""Ranks as threads of one process, one running at a time. Also the smallest complete backend."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..backend.interface import Backend, Capabilities
from ..comm.signature import Call, call_place, disagreement
from ..comm.transport import Primitive
from ..comm.wrapper import TransportWrapper
from ..errors import BackendError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from ..layout.mesh import Group, Mesh
from ..processes.transfer import Outcome, outcome_of, root_cause
from ..runtime.context import ParallelContext, in_eager_mode, use
from ..runtime.gradients import summed_in_trees
from ..runtime.guards import whole_tensors_only
from ..runtime.init import check_reproducible, checking

GRACE = 5.0  # seconds for ranks to end once one has failed, or the time is over
T = TypeVar("T")
_Box = dict[int, tuple[Any, Any]]
"""By rank, where those who have come to a meeting are, and what each brings."""


class RankThreads:
    """Ranks that take turns. A rank runs until it waits for others, and hands its turn, with the state of the process,
    to the rank that has been ready the longest. So a run is deterministic, and a deadlock is found at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        # held until it is the rank's turn; a thread of autograd may wait in place of its rank's
        self._turns = [threading.Lock() for _ in range(size)]
        for turn in self._turns:
            turn.acquire()
        self._ready = deque(range(size))
        self.waiting: dict[int, Any] = {}
        self.ended: dict[int, Outcome] = {}
        self.met: Counter[tuple[tuple[int, ...], int]] = Counter()
        """How often a rank has met others, by members and rank."""
        self._boxes: dict[tuple[tuple[int, ...], int], _Box] = {}
        self._threads: list[threading.Thread] = []
        self._running, self._moved_at = 0, 0.0
        self._ends = threading.Semaphore(0)
        self._late = ""  # what CollectiveTimeoutError says, once the time is over

    def saved(self) -> Callable[[], object]:
        """Save the state of the process that belongs to the running rank; the result restores it."""
        return partial(torch.set_rng_state, torch.get_rng_state())

    def meet(self, members: tuple[int, ...], rank: int, at: Any, mine: Any) -> list[tuple[Any, Any]]:
        """Wait for all ``members``. Return where each is, and what it brings, in group order."""
        self._raise_if_late()
        meeting = members, self.met[members, rank]
        self.met[members, rank] += 1
        box = self._boxes.setdefault(meeting, {})
        box[rank] = at, mine
        if len(box) == len(members):
            del self._boxes[meeting]
            woken = [member for member in members if member in self.waiting]  # others may have ended
            for member in woken:
                del self.waiting[member]
            self._wake(woken)
        else:
            self._wait(members, rank, at, box)
        return [box[member] for member in members]

    def _wake(self, ranks: Iterable[int]) -> None:
        self._moved_at = time.monotonic()
        self._ready.extend(rank for rank in ranks if rank not in self._ready)

    def _hand_over(self) -> None:
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def _wait(self, members: tuple[int, ...], rank: int, at: Any, box: _Box) -> None:
        restore = self.saved()
        try:
            while len(box) < len(members):
                self.waiting[rank] = at
                self._raise_if_hopeless(rank, at, [r for r in members if r not in box])
                self._hand_over()
                self._turns[rank].acquire()
        finally:
            self.waiting.pop(rank, None)
            self._running = rank
            restore()

    def _raise_if_late(self) -> None:
        if self._late:
            raise CollectiveTimeoutError(self._late)

    def _raise_if_hopeless(self, rank: int, at: Any, missing: list[int]) -> None:
        self._raise_if_late()
        failed = [r for r, o in self.ended.items() if o.error is not None and not isinstance(o.error, PeerLostError)]
        if failed:
            raise PeerLostError(f"rank {failed[0]} {self._state(failed[0])}; rank {rank} was at {at}")
        left = [r for r in missing if r in self.ended]
        if left:
            raise PeerLostError(f"rank {left[0]} has finished, but rank {rank} waits for it at {at}")
        if not self._ready:
            raise BackendError(f"deadlock: every rank waits for another\n{self._report()}")

    def _report(self) -> str:
        return "\n".join(f"  rank {r} {self._state(r)}" for r in range(self.size))

    def _state(self, rank: int) -> str:
        if rank in self.waiting:
            return f"waits at {self.waiting[rank]}"
        if rank in self.ended:
            error = self.ended[rank].error
            return "has finished" if error is None else f"failed with {type(error).__name__}: {error}"
        frame = sys._current_frames().get(self._threads[rank].ident or 0)
        lines = traceback.extract_stack(frame)[-3:] if frame else []
        where = " < ".join(f"{f.filename}:{f.lineno} in {f.name}" for f in reversed(lines))
        return f"{'runs' if rank == self._running else 'waits for its turn'} at {where}"

    def run(self, fn: Callable[[int], Any], timeout: float | None = None) -> list[Outcome]:
        """Call ``fn(rank)`` on every rank, each from this process's state. Return each outcome. If none has met others
        or ended for ``timeout`` seconds, all get CollectiveTimeoutError; who runs on for another GRACE has it too."""
        restore = self.saved()

        def one(rank: int) -> None:
            with self._turns[rank]:
                self._running = rank
                restore()
                self.ended[rank] = outcome_of(partial(fn, rank))
                self._wake(self.waiting)  # to see whether they wait in vain
                self._ends.release()
                self._hand_over()

        self._moved_at = time.monotonic()
        for rank in range(self.size):
            run, name = copy_context().run, f"rank {rank}"
            self._threads.append(threading.Thread(target=run, args=(one, rank), name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        self._hand_over()
        self._await_ends(timeout)
        restore()
        return [self.ended.get(r, Outcome(error=CollectiveTimeoutError(self._late))) for r in range(self.size)]

    def _await_ends(self, timeout: float | None) -> None:
        """Until all ranks have ended, or some run on although the others can no longer be right."""
        while timeout is not None and len(self.ended) < self.size:
            hopeless = bool(self._late) or any(o.error is not None for o in tuple(self.ended.values()))
            limit = min(timeout, GRACE) if hopeless else timeout
            left = self._moved_at + limit - time.monotonic()
            if left > 0:
                self._ends.acquire(timeout=left)
                continue
            self._late = self._late or f"no rank has moved on for {limit:g} s:\n{self._report()}"
            if hopeless:
                return
            self._moved_at = time.monotonic()
        for thread in self._threads:
            thread.join()


class ThreadWorld(RankThreads):
    """Ranks that exchange tensors."""

    def exchange(self, members: tuple[int, ...], rank: int, op: str, x: Tensor) -> list[Tensor]:
        """Every member's tensor, in group order, once all members have made the same call."""
        call = Call.of(self.met[members, rank], op, x.shape, x.dtype, call_place())
        # a copy: this rank may go on and change x before the others wake up and read it
        every = self.meet(members, rank, call, x.detach().clone(memory_format=torch.contiguous_format))
        calls = [other for other, _ in every]
        if any(other != call for other in calls):
            raise CollectiveMismatchError(disagreement(calls, members))
        return [tensor for _, tensor in every]


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
    mesh: Mesh,
    fn: Callable[..., T],
    *args: Any,
    backend: type[ThreadBackend] = ThreadBackend,
    reproducible: int | None = None,
    check: bool = False,
) -> list[T]:
    """Call ``fn(ctx, *args)`` on every rank of ``mesh``; return the results in rank order. Every rank starts from the
    caller's random state. ``reproducible``: as in ``tpcore.init``. ``check``: what is computed is followed, as in jobs
    with ``TPCORE_CHECK=1``; BackendError if no installed extension does.

    If ranks fail, the first failure that is not a consequence of another is raised."""
    check_reproducible(reproducible, mesh, torch.device("cpu"))
    world = ThreadWorld(mesh.size)

    def one(rank: int) -> T:
        ctx = ParallelContext(backend(rank, world), mesh, rank, reproducible=reproducible)
        with use(replace(ctx, observer=checking(ctx, "check=True")) if check else ctx) as ctx:
            return fn(ctx, *args)

    with (
        whole_tensors_only(),
        nullcontext() if reproducible is None else summed_in_trees(),
        in_eager_mode() if check else nullcontext(),
    ):
        outcomes = world.run(one)
    error = root_cause(outcomes)
    if error is not None:
        raise error
    return [outcome.value for outcome in outcomes]
