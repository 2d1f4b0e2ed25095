"""The last collectives of each rank, and from them why a job is lost: the verdict that all ranks get. Ranks publish
their reports, how they ended, and the verdict at the job's store."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import methodcaller
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from ...comm.signature import Call, Caller
from ...errors import BackendError, CollectiveTimeoutError, PeerLostError
from .host import SECONDS, answers, keep_alive_towards

T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """The first one posted holds for every rank."""

    kind: str  # "lost" or "timeout"
    text: str

    def error(self, doing: str) -> BackendError:
        cls = CollectiveTimeoutError if self.kind == "timeout" else PeerLostError
        return cls(f"{self.text}\nthis rank's last collective: {doing}")


def connection_broke(error: BaseException) -> bool:
    """Whether a transport failed: by torch's type of error, or by the path of gloo's file in its message."""
    of_gloo = isinstance(error, RuntimeError) and not isinstance(error, BackendError) and "transport/" in str(error)
    return of_gloo or isinstance(error, dist.DistBackendError | dist.DistNetworkError)


def cause_of_end(error: BaseException) -> str:
    """How ``error`` ended a rank, as the end of a sentence."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    return f"raised {type(error).__name__}: {error}"


class Watched(Protocol):
    """A group, of whose collectives ``seq`` have begun on this rank."""

    axes: tuple[str, ...]
    members: tuple[int, ...]
    seq: int


EnteredCall = tuple[Watched, int, str, Sequence[int], torch.dtype, Caller | None]
"""Group, seq, op, shape, dtype, site. A plain tuple, because each collective makes one."""


class FlightRecorder:
    """The rank writes it at every collective; the thread of ``PeerMonitor`` reads it."""

    def __init__(self) -> None:
        self.entries: deque[EnteredCall] = deque(maxlen=10)
        self.waiting: Watched | None = None
        self.groups: list[Watched] = []

    def last(self) -> str:
        return describe(self.entries[-1]) if self.entries else "no collective yet"

    def report(self) -> RankReport:
        waiting, counts = self.waiting, {_key(g.members): g.seq for g in list(self.groups)}
        calls = tuple(describe(e) for e in list(self.entries))
        return RankReport(calls, counts, () if waiting is None else waiting.members)


def describe(entry: EnteredCall) -> str:
    group, seq, op, shape, dtype, site = entry
    return f"{' x '.join(group.axes)} {list(group.members)} {Call.of(seq, op, shape, dtype, site)}"


def _key(members: Sequence[int]) -> str:
    return ",".join(map(str, members))


@dataclass(frozen=True)
class RankReport:
    """The report that one rank publishes. ``counts``: collectives entered so far, for each group."""

    calls: tuple[str, ...] = ()
    counts: Mapping[str, int] | None = None
    waiting: tuple[int, ...] = ()
    at: float = 0.0  # wall clock of its writing: between hosts as true as their clocks
    stopped: tuple[int, ...] = ()  # ranks of this one's host

    def pack(self) -> str:
        return json.dumps([self.calls, self.counts, self.waiting, self.at, self.stopped])

    @classmethod
    def unpack(cls, data: str) -> RankReport:
        calls, counts, waiting, at, stopped = json.loads(data)
        return cls(tuple(calls), counts, tuple(waiting), at, tuple(stopped))

    def count(self, members: Sequence[int]) -> int:
        return (self.counts or {}).get(_key(members), 0)


def absent(members: Sequence[int], rank: int, reports: Mapping[int, RankReport]) -> list[int]:
    """Members that have entered fewer collectives of this group than ``rank`` has."""
    entered = reports[rank].count(members)
    return [m for m in members if m != rank and reports.get(m, RankReport()).count(members) < entered]


def timeout_report(
    rank: int, members: Sequence[int], seconds: float, reports: Mapping[int, RankReport], state: Callable[[int], str]
) -> str:
    """Whom ``rank`` waited for, whom those wait for, and all last calls. ``state``: what else is known of a rank."""
    lines = [f"rank {rank} waited {seconds:g} s in a collective of group {list(members)}"]
    seen, queue = {rank}, [(rank, tuple(members))]
    while queue:
        waiter, group = queue.pop(0)
        missing = absent(group, waiter, reports)
        # in the middle of the collective, which all have begun
        halted = [] if missing else [m for m in group if m != waiter and state(m)]
        if not missing and not halted:
            problem = "all came, but nothing completed: links lose packets, or calls differ (TPCORE_CHECK=1)"
            lines.append(f"  rank {waiter} in group {list(group)}: {problem}")
        for m in halted:
            lines.append(f"  rank {waiter} waits for rank {m}, which came and did not finish{state(m)}")
        for m in missing:
            # a stopped rank's report is from before the stop; in this group it no longer waits
            further = () if state(m) or reports[m].waiting == group else reports[m].waiting
            why = f"itself waits in group {list(further)}" if further else "did not come"
            lines.append(f"  rank {waiter} waits for rank {m}, which {why}{state(m)}")
            if further and m not in seen:
                queue.append((m, further))
            seen.add(m)
    lines.append("last collectives:")
    for r, report in sorted(reports.items()):
        age = f", as of {time.time() - report.at:.1f} s ago" if r != rank and report.at else ""
        lines.append(f"  rank {r}{state(r)}{age}:")
        lines.extend(f"    {call}" for call in report.calls or ("none yet",))
    return "\n".join(lines)


class StatusStore:
    """Used by one thread. Once the store is gone it says nothing and ``trouble`` why, which is no alarm by
    itself: whoever hosts the store may simply have finished first. ``cut_off``: its host does not answer."""

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        folder: Path | None = None,
        place: tuple[str, int] | None = None,
        seconds: float = SECONDS,
        needed: Callable[[], bool] | None = None,
    ) -> None:
        """``folder``: for reports, where the store is a file: that one would grow by each report. ``place``:
        host and port of a server. ``seconds``: for which its host may be silent. ``needed``, if rank 0 is the host:
        whether another thread of this rank uses the store now."""
        self._connect, self._folder, self._seconds, self.place = connect, folder, seconds, place
        self.needed, self.left = needed, False
        self._store: dist.Store | None = None
        self.trouble = ""
        self.cut_off = False

    def open(self) -> None:
        try:
            self._store = self._connect()
            if self.place is not None:
                keep_alive_towards(self.place[1], self._seconds)
        except RuntimeError as e:
            self._lose(e)

    def publish(self, rank: int, report: RankReport) -> None:
        if self._folder is None:
            self._do(lambda store: store.set(f"report/{rank}", report.pack()))
            return
        with suppress(OSError):  # the job's folder was removed, or the disk is full
            self._folder.mkdir(exist_ok=True)
            new = self._folder / f"{rank}.new"
            new.write_text(report.pack())
            new.rename(self._folder / str(rank))

    def reports(self, ranks: Iterable[int]) -> dict[int, RankReport]:
        """The last report of each rank that has published one."""
        published = {r: self._report(r) for r in ranks}
        return {r: RankReport.unpack(data) for r, data in published.items() if data}

    def _report(self, rank: int) -> str | None:
        if self._folder is None:
            return self._get(f"report/{rank}")
        with suppress(OSError):
            return (self._folder / str(rank)).read_text()
        return None

    def make_way(self, rank: int) -> None:
        """Leave the store if its host ends. A use of a store that is gone would print a stack trace of C++."""
        if self.needed is not None and not self.needed() and self._get("closing") is not None:
            self.leave(rank)

    def outlast(self, others: Callable[[], Sequence[int]]) -> None:
        """On the host: wait until the ``others`` have left, which takes them a beat, but not for ever."""
        self._do(lambda store: store.set("closing", ""))
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline and (keys := [f"left/{r}" for r in others()]):
            if self._do(methodcaller("check", keys)) is not False:
                return
            time.sleep(0.01)

    def leave(self, rank: int) -> None:
        """The last call. Removes the reports of ``rank``, which no rank needs any more."""
        if self.needed is not None:
            self._do(lambda store: store.set(f"left/{rank}", ""))
        self._store, self.left = None, True
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / str(rank)).unlink()
                self._folder.rmdir()  # succeeds for the last rank

    def post(self, verdict: Verdict) -> Verdict | None:
        """Post ``verdict`` unless there is one; return the job's verdict, or None without a store."""
        return _verdict(self._first("verdict", json.dumps(asdict(verdict))))

    def verdict(self) -> Verdict | None:
        return _verdict(self._get("verdict"))

    def end(self, rank: int, cause: str) -> None:
        """Publish the ``cause`` of a rank's end; the first call counts."""
        self._first(f"end/{rank}", cause)

    def ended(self, rank: int) -> str | None:
        return self._get(f"end/{rank}")

    def _get(self, key: str) -> str | None:
        return self._do(lambda store: store.get(key).decode() if store.check([key]) else None)

    def _first(self, key: str, value: str) -> str | None:
        return self._do(lambda store: store.compare_set(key, "", value).decode())

    def _do(self, call: Callable[[dist.Store], T]) -> T | None:
        if self._store is not None:
            try:
                return call(self._store)
            except RuntimeError as e:  # the base class of all errors of a store
                self._lose(e)
        return None

    def _lose(self, error: RuntimeError) -> None:
        self._store = None
        self.trouble = f"the job's store is gone ({str(error).splitlines()[0]}): its host has ended"
        if self.place is not None and not answers(*self.place):
            host, port = self.place
            self.trouble, self.cut_off = f"the job's store at {host}:{port} cannot be reached", True


def _verdict(data: str | None) -> Verdict | None:
    return Verdict(**json.loads(data)) if data else None
