"""Joining a job over torch.distributed, with gloo for transport."""

from __future__ import annotations

import json
import os
import socket
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcore.backend.programs import Dims, Function, LoadedProgram
from tpcore.c10d.backend import C10dBackend, Members, job_of_environment
from tpcore.c10d.supervision.flight_recorder import FlightRecorder
from tpcore.c10d.supervision.host import RANK_MEMORY, Identity, available_memory, sever, sockets
from tpcore.c10d.supervision.peers import Peers
from tpcore.c10d.supervision.rendezvous import Rendezvous, own_client, store_of_environment
from tpcore.c10d.supervision.status_store import StatusStore, Verdict
from tpcore.c10d.supervision.waiting import Waiting
from tpcore.calls import checked_calls
from tpcore.comm import Comm
from tpcore.context import current
from tpcore.errors import BackendError, CollectiveMismatchError
from tpcore.mesh import Group
from tpcore.settings import changed

from .gloo import GlooComm
from .settings import INTERFACE

_HERE = os.path.dirname(__file__) + os.sep


class GlooBackend(C10dBackend):
    """Joining and ending a job are its own, so that ranks which are lost or disagree are named."""

    transport = "gloo"
    comm_class = GlooComm
    capabilities = replace(
        C10dBackend.capabilities,
        moved=(torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn),
        tracing=torch.__version__ >= "2.9",  # the oldest torch.export that this was tested with
    )

    def __init__(self, store: dist.Store | None = None, rank: int = 0, world: int = 1) -> None:
        super().__init__(store, rank, world)
        self._guards: dict[Any, Waiting] = {}
        self._sides: Counter[Members] = Counter()
        self._comms: list[GlooComm] = []
        self._journal = FlightRecorder()
        self._monitor: Peers | None = None

    def start(self, timeout: float) -> tuple[int, int]:
        self._timeout, self._checked = timeout, checked_calls()
        try:
            return self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> tuple[int, int]:
        adopted = dist.is_initialized()
        if adopted:
            store, rank, world = (
                _default_store(),
                dist.get_rank(),
                dist.get_world_size(),
            )
        else:
            job = self._given or job_of_environment() or store_of_environment(self._timeout)
            store, rank, world = job or (dist.HashStore(), 0, 1)
        self._rank, self._world = rank, world
        if world > 1:
            # a program may start, stop and start again at one store, where what was said stays
            store = dist.PrefixStore(f"tpcore{store.add(f'tpcore/starts/{rank}', 1)}", store)
            self._lobby = Rendezvous(store, rank, world, self._timeout)
            self._monitor = self._watch(store)
        if not adopted:
            with self._connecting(range(world)):
                seconds = timedelta(seconds=self._timeout)
                self._owns = True  # from here on, for an error inside may leave it half made
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=seconds)
        if world > 1:
            # an error that all ranks raise next must not cut off one that is still connecting
            self._lobby.meet("have joined", "", self._lost)
        return rank, world

    def stop(self) -> None:
        error = sys.exc_info()[1]  # of the with or finally block that stops this rank, if that is why
        if self._monitor is not None:
            if error is not None:
                self._monitor.fail(error)
            self._monitor.close("left the job (tpcore.shutdown)")
            if self._monitor.verdict is not None:
                sever(self._monitor.sockets)
        for comm in self._comms:
            comm.close()
        self._guards.clear()
        super().stop()

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
        comms = [ctx.comm(axis) for axis in ctx.mesh.axes] + [ctx.world]
        programs.trace(fn, weights, inputs, dims, comms, ctx.world, folder)

    def load_program(self, folder: Path, weights: Mapping[str, Tensor]) -> LoadedProgram:
        from . import programs

        return programs.load(folder, weights, lambda axes: current().comm(*axes.split(".")))

    def _comm(self, group: Group, pg: Callable[[], Any]) -> Comm:
        members = group.members(self._rank)
        if group.size == 1:
            return GlooComm(group, 0, pg, None)
        if pg() not in self._guards:
            self._guards[pg()] = self._guard(group.axes, members)
        guard = self._guards[pg()]
        guard.axes = min(guard.axes, group.axes, key=len)  # one group may serve several axes
        comm = GlooComm(group, members.index(self._rank), pg, guard)
        self._comms.append(comm)
        return comm

    def _watch(self, store: dist.Store) -> Peers:
        """Who is here, and whether all mean to check the same; then the thread that watches them."""
        said = [
            json.loads(text) for text in self._lobby.meet("start", self._introduction(), lambda missing: None)
        ]
        checks = {checked for _, checked, _ in said}
        if len(checks) > 1:
            told = ", ".join(f"rank {r}: {checked}" for r, (_, checked, _) in enumerate(said))
            raise ValueError(f"TPCORE_CHECK must be the same on all ranks; calls to check are {told}")
        connect = partial(own_client, store, f"tpcore monitor {said[0][2]}", self._timeout)
        monitor = Peers(
            StatusStore(connect), self._rank, [Identity(*peer) for peer, _, _ in said], self._journal
        )
        monitor.open()
        return monitor

    def _introduction(self) -> str:
        return json.dumps([astuple(Identity.own()), self._checked, uuid.uuid4().hex])

    def _group(self, group: Group) -> Any:
        heard = self._lobby.meet(f"make group {len(self._groups)}", repr(group.partition), self._lost)
        for rank, partition in enumerate(heard):
            if partition != heard[0]:
                raise CollectiveMismatchError(
                    f"ranks 0 and {rank} disagree on the next groups to make (is tp the same on both?):\n"
                    f"  rank 0: {heard[0]}\n  rank {rank}: {partition}"
                )
        members = group.members(self._rank)
        with self._connecting(members):
            pg = super()._group(group)
        self._guards[pg] = self._guard(group.axes, members)
        self._lobby.meet(f"have made group {len(self._groups)}", "", self._lost)
        return pg

    def _lost(self, missing: Sequence[int]) -> BackendError | None:
        verdict = None if self._monitor is None else self._monitor.find(missing)
        return None if verdict is None else verdict.error(self._journal.last())

    def _guard(self, axes: Sequence[str], members: Members) -> Waiting:
        if self._monitor is None:
            raise BackendError(f"group {members} was made after tpcore.shutdown()")
        side = None
        if self._checked:
            self._sides[members] += 1
            store = dist.PrefixStore(f"side of {members} {self._sides[members]}", self._lobby.store)
            seconds = timedelta(seconds=self._timeout)
            with self._connecting(members):
                side = dist.ProcessGroupGloo(store, members.index(self._rank), len(members), seconds)
        checked = self._checked, side
        return Waiting(axes, members, self._rank, checked, self._timeout, self._journal, self._monitor, _HERE)

    def _single(self) -> Any:
        with _loopback():
            return super()._single()

    @contextmanager
    def _connecting(self, members: Sequence[int]) -> Iterator[None]:
        """Gloo connects to ``members`` in here: note its sockets, and name the rank that fails."""
        before = sockets()
        try:
            if self._monitor is None:
                with _loopback():
                    yield
                return
            yield
        except dist.DistStoreError as e:
            if self._monitor is None:
                raise
            text = f"rank {self._rank} waited {self._timeout:g} s for ranks {list(members)} to connect: {e}"
            raise self._monitor.post(Verdict("timeout", text)).error(self._journal.last()) from e
        except RuntimeError as e:
            if self._monitor is None or isinstance(e, BackendError):
                raise
            raise self._monitor.diagnose(members, e).error(self._journal.last()) from e
        finally:
            if self._monitor is not None:
                self._monitor.sockets |= sockets() - before


def _default_store() -> dist.Store:
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


@contextmanager
def _loopback() -> Iterator[None]:
    """A group of one needs no port that others can reach, and gloo opens one."""
    local = [i for _, i in socket.if_nameindex() if i in ("lo", "lo0")]
    with changed({INTERFACE.name: local[0]} if local and not INTERFACE.is_set else {}):
        yield
