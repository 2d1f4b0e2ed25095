"""The last collectives of each rank, and from them why a job is lost: the verdict that all ranks get."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from ...comm.signature import Call, Caller
from ...errors import BackendError, CollectiveTimeoutError, PeerLostError


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
    if isinstance(error, BackendError):
        return False
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and "transport/" in str(error)
    )


def cause_of_end(error: BaseException) -> str:
    """How ``error`` ended a rank, as the end of a sentence."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    return f"raised {type(error).__name__}: {error}"


_KEPT = 10


class Watched(Protocol):
    """A group, of whose collectives ``seq`` have begun on this rank."""

    axes: tuple[str, ...]
    members: tuple[int, ...]
    seq: int


Entry = tuple[Watched, int, str, Sequence[int], torch.dtype, Caller | None]
"""Group, seq, op, shape, dtype, site. A plain tuple, because each collective makes one."""


class FlightRecorder:
    """The rank writes it at every collective; the thread of ``PeerMonitor`` reads it."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=_KEPT)
        self.waiting: Watched | None = None
        self.groups: list[Watched] = []

    def last(self) -> str:
        return describe(self.entries[-1]) if self.entries else "no collective yet"

    def report(self) -> RankReport:
        waiting = self.waiting
        return RankReport(
            calls=tuple(describe(e) for e in list(self.entries)),
            counts={_key(g.members): g.seq for g in list(self.groups)},
            waiting=() if waiting is None else waiting.members,
        )


def describe(entry: Entry) -> str:
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
    mine = reports[rank].count(members)
    return [m for m in members if m != rank and reports.get(m, RankReport()).count(members) < mine]


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
            what = "all came, but nothing completed: links lose packets, or calls differ (TPCORE_CHECK=1)"
            lines.append(f"  rank {waiter} in group {list(group)}: {what}")
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
