"""The supervision of one job: names lost ranks, finds mismatched calls, explains time-outs."""

from __future__ import annotations

import ctypes
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from functools import partial
from typing import Any

import torch.distributed as dist

from ... import settings
from ...comm.signature import ALL, checked_calls
from ...errors import BackendError, CollectiveMismatchError
from ...runtime.consensus import agree
from ...settings import CHECK
from .fingerprints import FingerprintExchange, connected
from .host import SECONDS, Identity, Links, connections, sockets
from .peers import PeerMonitor
from .rendezvous import Rendezvous, address_towards, folder_beside, own_client, place_of_server, timed_out
from .status import FlightRecorder, StatusStore, Verdict
from .waiting import Waiting

Members = tuple[int, ...]
Sockets = Callable[[], frozenset[int]]
_RUN_AHEAD = {False: 4, True: 64}
"""Calls by which a rank may be ahead before it waits for its peers' fingerprints. True: the device has a queue."""


class Supervisor:
    """``library``: path prefixes of the backend's own files, which call sites skip. ``lazy``: the transport's
    wait returns at once and makes a device's stream wait."""

    def __init__(
        self, store: dist.Store, rank: int, world: int, timeout: float, library: Sequence[str], lazy: bool
    ) -> None:
        self._token = uuid.uuid4().hex
        self._twice = partial(twice, store)
        claim(store, rank, Identity.own(), self._token, timeout)
        # a program may start, stop and start again at one store, which keeps the old keys
        self.store = store = dist.PrefixStore(f"tpcore{store.add(f'tpcore/starts/{rank}', 1)}", store)
        self._rank, self._timeout, self._checked = rank, timeout, checked_calls()
        self._library, self._lazy, self._recorder = tuple(library), lazy, FlightRecorder()
        self._rendezvous = Rendezvous(store, rank, world, timeout)
        self._exchanges: Counter[Members] = Counter()
        self._waiting: dict[Any, Waiting] = {}
        self.peers = self._introduced(store)
        self.peers.open()

    def _introduced(self, store: dist.Store) -> PeerMonitor:
        """Exchange the ranks' identities. ValueError if they check other calls, or if their versions differ."""
        ids = job_ids(self._rendezvous.world)
        hello = json.dumps([astuple(Identity.own()), self._checked, self._token, f"tpcore {settings.__version__}", ids])
        texts = self._rendezvous.meet("start", hello, lambda _: self._twice())
        hellos = [json.loads(text) for text in texts]
        try:
            self._alike(hellos)
        except ValueError:
            # rank 0 may host the store, which ends with it: until all have read it, or as long as one takes to
            briefly = Rendezvous(store, self._rank, self._rendezvous.world, min(SECONDS, self._timeout))
            with suppress(BackendError):
                briefly.meet("refuse to start", "")
            raise
        connect = partial(own_client, store, _MONITOR.format(hellos[0][2]), self._timeout)
        identities = [Identity(*peer) for peer, *_ in hellos]
        self._address = address_towards(store, all(i.hostname == identities[0].hostname for i in identities))
        silent, place = min(SECONDS, self._timeout), place_of_server(store)
        needed = None if place is None or settings.AGENT_STORE.get() else lambda: self._rendezvous.meeting
        status = StatusStore(connect, folder_beside(store, f"reports-{hellos[0][2]}"), place, silent, needed)
        return PeerMonitor(status, self._rank, identities, self._recorder, self._linked(identities, silent))

    @staticmethod
    def _alike(hellos: Sequence[Any]) -> None:
        _, calls, _, versions, jobs = zip(*hellos, strict=True)
        apart = "two jobs were given one address. Give each a MASTER_PORT of its own"
        same: dict[str, Sequence[Any]] = {
            f"rank 0 has {name}={{}} and rank {{}} {{}}: {apart}": [job.get(name, jobs[0][name]) for job in jobs]
            for name in jobs[0]
        }
        same[f"{CHECK.name} must be the same on all ranks; calls to check are rank 0: {{}}, rank {{}}: {{}}"] = [
            "all" if count == ALL else count for count in calls
        ]
        same["rank 0 runs {} and rank {} {}: install the same on all"] = versions
        for text, values in same.items():
            agree(values, lambda rank, first, other: ValueError(text.format(first, rank, other)))  # noqa: B023

    def _linked(self, identities: Sequence[Identity], silent: float) -> Links:
        """The first ranks of all hosts, connected, if there are several hosts."""
        first, hosts = dict[str, int](), dict[str, list[int]]()
        for rank, identity in enumerate(identities):
            first.setdefault(identity.host or str(rank), rank)
        heads = list(first.values())
        if len(heads) == 1:
            return Links({}, {})
        for rank, address in enumerate(self._rendezvous.meet("tell addresses", self._address)):
            hosts.setdefault(address, []).append(rank)
        if self._rank not in heads:
            return Links({}, hosts, silent)
        meet = partial(self._rendezvous.meet, "link hosts", ranks=heads)
        links = connected(heads.index(self._rank), len(heads), self._address, self._timeout, meet)
        return Links({heads[i]: s for i, s in links.items()}, hosts, silent)

    def meet(self, purpose: str, text: str = "") -> list[str]:
        """Wait for all ranks, so that an error of all cuts off none that still connects; return each one's text."""
        return self._rendezvous.meet(purpose, text, self._lost)

    def agree_on_group(self, number: int, partition: tuple[Members, ...]) -> None:
        """Raise CollectiveMismatchError on all ranks if they are about to make different groups."""
        text = "ranks 0 and {0} disagree on the next groups to make (is tp the same on both?):"
        text += "\n  rank 0: {1}\n  rank {0}: {2}"
        partitions = self._rendezvous.meet(f"make group {number}", repr(partition), self._lost)
        agree(partitions, lambda *differing: CollectiveMismatchError(text.format(*differing)))

    @contextmanager
    def connecting(self, members: Sequence[int], opened: Sockets = sockets) -> Iterator[None]:
        """Connect to ``members`` in the block: an error names the failed rank; a lost job's new sockets are cut."""
        before = opened()
        try:
            yield
        except RuntimeError as e:
            if isinstance(e, BackendError):
                raise
            verdict = self._late(members, e) if timed_out(e) else self.peers.diagnose(members, e)
            raise verdict.error(self._recorder.last()) from e
        finally:
            new, place = opened() - before, place_of_server(self.store)
            # not those that threads have with the store, which all use until they end
            self.peers.sockets |= new - {inode for inode, _ in connections(place[1] if place else 0)}

    def _late(self, members: Sequence[int], error: RuntimeError) -> Verdict:
        """The verdict after ``members`` did not connect in time: a lost rank, or what is known of each."""
        peers, others = self.peers, [m for m in members if m != self._rank]
        if lost := peers.find(others):
            return lost
        reports = peers.reports()
        who = ", ".join(f"rank {m}{peers.state(m, reports)}" for m in others)
        text = f"rank {self._rank} waited {self._timeout:g} s to connect with {who}: {error}"
        return peers.post(Verdict("timeout", text))

    def waiting(self, pg: Any, axes: Sequence[str], members: Members, compares: Callable[[Waiting], bool]) -> Waiting:
        """The watch around the collectives of ``pg``. One process group may serve several axes. ``compares``:
        whether the group's transport compares calls; all members call it, once for a group."""
        if pg not in self._waiting:
            watch = Waiting(axes, members, self._checked, self._timeout, self.peers, self._library, self._lazy)
            if not compares(watch) and self._checked:
                watch.fingerprints = self._fingerprints(members)
            self._waiting[pg] = watch
        waiting = self._waiting[pg]
        waiting.axes = min(waiting.axes, tuple(axes), key=len)
        return waiting

    def _fingerprints(self, members: Members) -> FingerprintExchange:
        """Connect the members over sockets of their own, whatever the transport."""
        self._exchanges[members] += 1
        purpose, position = f"compare calls {members} {self._exchanges[members]}", members.index(self._rank)
        meet = partial(self._rendezvous.meet, purpose, lost=self._lost, ranks=members)
        with self.connecting(members):
            remedy = f"; {CHECK.name}=off compares no calls, and needs none between these ranks"
            connections = connected(position, len(members), self._address, self._timeout, meet, remedy)
        return FingerprintExchange(members, position, connections, _RUN_AHEAD[self._lazy], self._checked == ALL)

    def _lost(self, missing: Sequence[int]) -> BackendError | None:
        verdict = self.peers.find(missing)
        return None if verdict is None else verdict.error(self._recorder.last())

    def settle(self) -> None:
        """Compare the calls that are not compared yet, before this rank leaves."""
        for waiting in self._waiting.values():
            waiting.settle()

    def close(self, error: BaseException | None) -> None:
        """``error``: the error that ends this rank, if any; then all other ranks fail too."""
        if error is not None:
            self.peers.fail(error)
        self.peers.close("left the job (tpcore.shutdown)")
        if self.peers.verdict is not None:
            self.peers.sever()
            # Never destroyed: that would join the threads of calls under way, and gloo does not always wake a thread
            # whose connection was cut while it sent (torch 2.13: in 1 of 20 to 30 jobs of 4 ranks): half an hour.
            for pg in self._waiting:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(pg))
        for waiting in self._waiting.values():
            waiting.close()
        self._waiting.clear()


_TWICE = "tpcore/twice"
_MONITOR = "tpcore monitor {}"  # the part of the store with the status of the job whose rank 0 drew this token


def claim(store: dist.Store, rank: int, identity: Identity, token: str, timeout: float) -> None:
    """Take the place of ``rank``. BackendError, here and on the job's ranks, if another process has it."""
    entry, key = json.dumps([astuple(identity), token]), f"tpcore/rank/{rank}"
    holder = Identity(*json.loads(store.compare_set(key, "", entry))[0])
    earlier = holder == identity or (holder.neighbour_of(identity) and holder.fate() is not None)
    status = None if earlier else _status(store, timeout)
    if earlier or (status is not None and status.ended(rank) is not None):
        store.set(key, entry)  # of an earlier start at this store
        return
    place = place_of_server(store)
    where = "" if place is None else f" to {place[0]}:{place[1]}"
    text = (
        f"rank {rank} has come twice{where}, as {holder} and as {identity}: two jobs have one address, or two processes"
    )
    text += " one RANK. Give each job a MASTER_PORT of its own"
    store.set(_TWICE, text)
    if status is not None:
        status.post(Verdict("lost", text))
    raise BackendError(text)


def twice(store: dist.Store) -> BackendError | None:
    """The error if a rank number of this job has come twice."""
    return BackendError(store.get(_TWICE).decode()) if store.check([_TWICE]) else None


def _status(store: dist.Store, timeout: float) -> StatusStore | None:
    """The status of the job whose rank 0 is at ``store``."""
    if not store.check(["tpcore/rank/0"]):
        return None
    prefix = _MONITOR.format(json.loads(store.get("tpcore/rank/0"))[1])
    status = StatusStore(partial(own_client, store, prefix, timeout))
    status.open()
    return status


def job_ids(world: int) -> dict[str, str]:
    """What all ranks of one job have in common, as far as its launcher says."""
    variables = [settings.RUN_ID] + ([] if settings.SLURM_HET.is_set else [settings.SLURM_JOB])
    return {"WORLD_SIZE": str(world)} | {v.name: v.text() for v in variables if v.is_set}
