"""Why a collective failed: a thread per process that knows, through the job's store, how the others are."""

from __future__ import annotations

import atexit
import json
import os
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from tpcore.backend import say
from tpcore.errors import BackendError, CollectiveTimeoutError, PeerLostError

from .journal import Journal, Report
from .process import CLEAN, GONE, Identity, sever

T = TypeVar("T")

_BEAT = 0.5  # seconds between two signs of life
_SILENT = 3.0  # seconds without one that are worth telling
_ANSWER = 2.0  # seconds the store may take: it does not answer while its host is stopped
_GRACE = 3.0  # seconds to find out who closed a connection; a dying process closes before it is a zombie
_LINGER = 1.0  # seconds for collectives that can still complete, before a lost job's sockets are cut


def of_gloo(error: BaseException) -> bool:
    """Whether a connection broke: the path of gloo's own file is part of each such message."""
    return (
        isinstance(error, RuntimeError) and not isinstance(error, BackendError) and "transport/" in str(error)
    )


@dataclass(frozen=True)
class Verdict:
    """Why the job is lost. The first one posted holds for every rank."""

    kind: str  # "lost" or "timeout"
    text: str

    def error(self, doing: str) -> BackendError:
        cls = CollectiveTimeoutError if self.kind == "timeout" else PeerLostError
        return cls(f"{self.text}\nthis rank's last collective: {doing}")


class Monitor(threading.Thread):
    """Publishes this rank's journal, watches its neighbours, and finds out who was lost.

    All store traffic after the start is made by this thread, so that a store that does not answer holds
    up nobody else.
    """

    def __init__(
        self, connect: Callable[[], dist.Store], rank: int, peers: Sequence[Identity], journal: Journal
    ) -> None:
        super().__init__(name="tpcore monitor", daemon=True)
        self.rank, self.peers, self.journal = rank, peers, journal
        self.verdict: Verdict | None = None
        self.sockets: set[int] = set()
        self._connect = connect
        self._store: dist.Store | None = None
        self._store_error = ""
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._unwatched: list[int] = []
        self._closed = False
        self._cut_at: float | None = None
        self._hook = sys.excepthook

    # -- called by the rank's own threads ---------------------------------------------------------------
    def open(self) -> None:
        self.start()
        self._hook, sys.excepthook = sys.excepthook, self._excepthook
        atexit.register(self._at_exit)

    def close(self, how: str) -> None:
        """Say how this rank ended, once, and stop watching."""
        self._ask(lambda: self._end(how), None)
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        self._closed = True
        self._wake()
        self.join(_ANSWER)

    def fail(self, error: BaseException) -> None:
        """This rank gives up with ``error``: all others will."""
        what = f"raised {type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            what = f"called sys.exit({error.code!r})"
        self._ask(lambda: self._end(what), None)
        if isinstance(error, (PeerLostError, CollectiveTimeoutError)):
            return  # it follows from a verdict
        if of_gloo(error):  # and did not pass through a Comm, which would have named the cause: DDP's
            say(self.diagnose(range(len(self.peers)), error).text)
        else:
            self.post(Verdict("lost", f"rank {self.rank} ({self.peers[self.rank]}) {what}"))

    def post(self, verdict: Verdict) -> Verdict:
        """Make ``verdict`` that of the job, unless another came first; return the one that holds."""
        holds = self._ask(lambda: self._post(verdict), None) or verdict
        return self._accept(self.verdict or holds)

    def final(self) -> Verdict | None:
        """The verdict, once collectives that could still complete have had the time to."""
        return self.verdict if self._cut_at is None else None

    def diagnose(self, members: Sequence[int], error: BaseException) -> Verdict:
        """A connection within ``members`` broke: whose, and why."""
        deadline = time.monotonic() + _GRACE
        others = [m for m in members if m != self.rank]
        while time.monotonic() < deadline:
            found = self.find(others)
            if found is not None:
                return found
            time.sleep(0.02)
        reports = self.reports()
        silent = "; ".join(f"rank {m}{self.state(m, reports[m])}" for m in others)
        text = f"a rank of group {list(members)} is lost: {silent}: {error}\n{self._store_error}"
        return self.post(Verdict("lost", text.rstrip()))

    def find(self, ranks: Sequence[int]) -> Verdict | None:
        """The verdict, if there is one or one of ``ranks`` is known to have ended."""
        found = self.verdict or self._ask(lambda: self._look(ranks), None) or self._look_around(ranks)
        return None if found is None else self.post(found)

    def reports(self) -> dict[int, Report]:
        """The last published journal of each rank, and this rank's own as it is now."""
        nothing: dict[int, Report] = {}
        found = self._ask(self._reports, nothing)
        every = {r: found.get(r, Report()) for r in range(len(self.peers))}
        return every | {self.rank: self.journal.report()}

    def state(self, rank: int, report: Report) -> str:
        """What can be said of a rank that does not come, as the end of a sentence."""
        if rank == self.rank:
            return ""
        if self.peers[rank].neighbour_of(self.peers[self.rank]):
            how = self.peers[rank].fate()
            if how is not None:
                return f" ({self.peers[rank]} {how})"
            if self.peers[rank].stopped():
                return f" ({self.peers[rank]} is stopped, by SIGSTOP or a debugger)"
        silent = time.time() - report.at
        return f" ({self.peers[rank]}, no sign of life for {silent:.0f} s)" if silent > _SILENT else ""

    def _ask(self, fn: Callable[[], T], default: T) -> T:
        """``fn`` in the monitor's thread, or ``default`` if the store does not answer."""
        if not self.is_alive() or threading.current_thread() is self:
            return default
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(fn() if self._store is not None else default)
            except RuntimeError as e:
                self._lose_store(e)
                answer.set_result(default)

        self._requests.put(run)
        self._wake()
        try:
            return answer.result(_ANSWER)
        except FutureTimeout:
            self._store_error = "the job's store does not answer: its host may be stopped"
            return default

    def _wake(self) -> None:
        if self.is_alive():
            os.write(self._wake_write, b"x")

    def _excepthook(self, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        # torch's own hook may hold this one beyond close(), and a data loader's fork has it too
        if not self._closed and os.getpid() == self.peers[self.rank].pid:
            self.fail(error)
        self._hook(kind, error, tb)

    def _at_exit(self) -> None:
        if os.getpid() == self.peers[self.rank].pid:
            self._ask(lambda: self._end("ended: its program finished or called sys.exit"), None)
            sever(self.sockets)

    # -- in the monitor's own thread --------------------------------------------------------------------
    def run(self) -> None:
        try:
            # here and not by the caller: torch asks the name server for the name of its peer's address,
            # and where none answers that takes 5 s (seen in one connection of 25)
            self._store = self._connect()
        except RuntimeError as e:
            self._lose_store(e)
        watched = self._watch()
        due = 0.0
        while not self._closed:
            if time.monotonic() >= due:
                self._guarded(self._beat)
                for rank in [r for r in self._unwatched if self.peers[r].fate()]:
                    self._unwatched.remove(rank)
                    self._died(rank)
                due = time.monotonic() + _BEAT
            wake = due if self._cut_at is None else min(due, self._cut_at)
            for key, _ in self._selector.select(max(0.0, wake - time.monotonic())):
                if key.data is None:
                    os.read(self._wake_read, 4096)
                else:
                    self._selector.unregister(key.fileobj)
                    self._died(key.data)
            while not self._requests.empty():
                self._requests.get()()
            if self._cut_at is not None and time.monotonic() >= self._cut_at:
                sever(self.sockets)
                self._cut_at = None
        for fd in (*watched, self._wake_read, self._wake_write):
            os.close(fd)
        self._selector.close()

    def _watch(self) -> list[int]:
        """Wake when a neighbour dies, early enough to read its exit status before its parent does."""
        fds = []
        neighbours = [r for r, p in enumerate(self.peers) if p.neighbour_of(self.peers[self.rank])]
        for rank in sorted({*neighbours} - {self.rank}):
            try:
                fds.append(os.pidfd_open(self.peers[rank].pid))
            except (AttributeError, OSError):  # an old kernel or Python, or dead already: look now and then
                self._unwatched.append(rank)
            else:
                self._selector.register(fds[-1], selectors.EVENT_READ, rank)
        return fds

    def _guarded(self, fn: Callable[[], None]) -> None:
        if self._store is not None:
            try:
                fn()
            except RuntimeError as e:
                self._lose_store(e)

    def _lose_store(self, error: RuntimeError) -> None:
        """No alarm by itself: whoever hosts the store may simply have finished first."""
        self._store = None
        self._store_error = f"the job's store is gone ({str(error).splitlines()[0]}): its host has ended"

    def _beat(self) -> None:
        report = replace(self.journal.report(), at=time.time())
        self._set(f"beat/{self.rank}", report.pack())
        self._heard()

    def _set(self, key: str, value: str) -> None:
        if self._store is not None:
            self._store.set(key, value)

    def _compare_set(self, key: str, value: str) -> str | None:
        return None if self._store is None else self._store.compare_set(key, "", value).decode()

    def _get(self, key: str) -> str | None:
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    def _heard(self) -> Verdict | None:
        data = None if self.verdict else self._get("verdict")
        return self._accept(Verdict(**json.loads(data))) if data else self.verdict

    def _post(self, verdict: Verdict) -> Verdict | None:
        data = self._compare_set("verdict", json.dumps(asdict(verdict)))
        return Verdict(**json.loads(data)) if data else None

    def _accept(self, verdict: Verdict) -> Verdict:
        if self.verdict is None:
            self._cut_at = time.monotonic() + _LINGER
            self.verdict = verdict
            self._wake()
        return self.verdict

    def _end(self, how: str) -> None:
        self._compare_set(f"end/{self.rank}", how)

    def _reports(self) -> dict[int, Report]:
        found = {r: self._get(f"beat/{r}") for r in range(len(self.peers))}
        return {r: Report.unpack(data) for r, data in found.items() if data is not None}

    def _died(self, rank: int) -> None:
        """A neighbour's process ended. Fatal at once if it failed, and had not left the job before."""
        how, said = self.peers[rank].fate() or "", self._said(rank) or "ended"
        if how in ("", CLEAN, GONE) or not said.startswith("ended"):
            return
        told = self.verdict
        verdict = Verdict("lost", f"rank {rank} ({self.peers[rank]}) {how}")
        try:
            verdict = self._post(verdict) or verdict
        except RuntimeError as e:
            self._lose_store(e)
        if self._accept(verdict) is not told and self._speaks():
            say(verdict.text)  # now: a launcher may end this rank before its error is printed

    def _speaks(self) -> bool:
        """One rank of a host is enough."""
        neighbours = [r for r, p in enumerate(self.peers) if p.neighbour_of(self.peers[self.rank])]
        return self.rank == next((r for r in neighbours if self.peers[r].fate() is None), self.rank)

    def _said(self, rank: int) -> str | None:
        try:
            return self._get(f"end/{rank}")
        except RuntimeError as e:
            self._lose_store(e)
            return None

    def _look(self, ranks: Sequence[int]) -> Verdict | None:
        heard = self._heard()
        if heard is not None:
            return heard
        said = {r: how for r in ranks if (how := self._said(r)) is not None}
        for r, how in sorted(said.items(), key=lambda item: not item[1].startswith("raised")):
            fate = self._fate(r)
            better = how if how.startswith("raised") or fate in (None, GONE) else fate
            return Verdict("lost", f"rank {r} ({self.peers[r]}) {better}")
        return None

    def _look_around(self, ranks: Sequence[int]) -> Verdict | None:
        for r in ranks:
            fate = self._fate(r)
            if fate is not None:
                hosted = f"; {self._store_error}" if self._store_error else ""
                return Verdict("lost", f"rank {r} ({self.peers[r]}) {fate}{hosted}")
        return None

    def _fate(self, rank: int) -> str | None:
        return self.peers[rank].fate() if self.peers[rank].neighbour_of(self.peers[self.rank]) else None
