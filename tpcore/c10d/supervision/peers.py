"""The reason why a collective failed: a thread in each process monitors the other ranks."""

from __future__ import annotations

import atexit
import os
import queue
import selectors
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

from ...errors import CollectiveTimeoutError, PeerLostError
from ...log import hold_lines, log
from .host import CLEAN, GONE, SECONDS, Identity, Links, LocalRanks, sever
from .status import FlightRecorder, RankReport, StatusStore, Verdict, cause_of_end, connection_broke

T = TypeVar("T")

_BEAT = 0.5  # seconds between two heartbeats
_SILENT = 3.0  # seconds without a heartbeat after which a message mentions it
_ANSWER = 2.0  # seconds to wait for the store, which does not answer while its host is stopped
_GRACE = 3.0  # seconds to find out who closed a connection; a dying process closes it before it is a zombie
_LINGER = 1.0  # seconds for collectives that can still complete, before a lost job's sockets are cut


class PeerMonitor(threading.Thread):
    """Publishes this rank's last calls, watches its neighbours, and finds out which rank was lost. Only this thread
    uses the store, so that a store that does not answer blocks no other thread."""

    def __init__(
        self, store: StatusStore, rank: int, peers: Sequence[Identity], recorder: FlightRecorder, links: Links
    ) -> None:
        super().__init__(name="tpcore monitor", daemon=True)
        self.rank, self.peers, self.recorder = rank, peers, recorder
        self.verdict: Verdict | None = None
        self.sockets: set[int] = set()  # of the groups, to be cut when the job is lost
        self.partings: set[Callable[[], None]] = set()  # the same for groups that share memory
        self._near, self._store, self._links = LocalRanks(rank, peers), store, links
        self._hosts = rank == 0 and store.needed is not None
        self.neighbours = frozenset(self._near.ranks)
        self._requests, self._selector = queue.SimpleQueue[Callable[[], None]](), selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed, self._hook = False, sys.excepthook
        self._cut_at: float | None = None

    # -- called by the rank's own threads
    def open(self) -> None:
        self.start()
        atexit.register(self._at_exit)
        # a finalizer runs after all handlers, among them a save's, which asks this thread for lost ranks
        self._end = weakref.finalize(self, self._finish)

    def hook(self) -> None:
        """Install a sys.excepthook above torch's, inside which text that is printed gets a prefix."""
        self._hook, sys.excepthook = sys.excepthook, self._excepthook

    def close(self, cause: str) -> None:
        """Publish how this rank ended, unless that is published already, and stop watching."""
        self._ask(lambda: self._store.end(self.rank, cause), None)
        atexit.unregister(self._at_exit)
        self._end.detach()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        self._finish()
        if not self.is_alive():
            self._selector.close()
            os.close(self._woken)
            os.close(self._wake)

    def _finish(self) -> None:
        """End this thread. Ended by the interpreter, in a call of the store, it would abort the process."""
        self._closed = True
        if self.is_alive():  # not in a forked process
            os.write(self._wake, b"x")
            self.join(_ANSWER + SECONDS * self._hosts)

    def fail(self, error: BaseException) -> None:
        """Publish that this rank failed with ``error``; all others will fail too."""
        cause = cause_of_end(error)
        self._ask(lambda: self._store.end(self.rank, cause), None)
        if isinstance(error, (PeerLostError, CollectiveTimeoutError)):
            return  # the error follows from a verdict
        if connection_broke(error):  # an error of DDP: a Comm would have named the cause
            log.error(self.diagnose(range(len(self.peers)), error).text)
        else:
            self.post(self._lost(self.rank, cause))

    def post(self, verdict: Verdict) -> Verdict:
        """Make ``verdict`` the job's verdict, unless there is one; return the job's verdict."""
        posted = self._ask(lambda: self._store.post(verdict), None)
        return self._accept(self.verdict or posted or verdict)

    def sever(self) -> None:
        """Cut the connections, so that no rank waits for this one any more."""
        sever(self.sockets)
        for part in list(self.partings):
            part()

    def final(self) -> Verdict | None:
        """The verdict, once collectives that can still complete have had the time to do so."""
        return self.verdict if self._cut_at is None else None

    def find(self, ranks: Sequence[int]) -> Verdict | None:
        """The verdict, if there is one or one of ``ranks`` is known to have ended."""
        verdict = self.look(ranks)
        return verdict and self.post(verdict)

    def look(self, ranks: Sequence[int]) -> Verdict | None:
        """Like ``find``, but the verdict is not posted to the other ranks."""
        lost = (self._lost(r, fate) for r in ranks if (fate := self._fate(r)) is not None)
        return self.verdict or self._ask(lambda: self._look(ranks), None) or next(lost, None)

    def gone(self, rank: int) -> str | None:
        """How the process of ``rank`` ended; None if it may still run, as after an error or after it left the job."""
        fate, prefix = self._fate(rank), f"rank {rank} ({self.peers[rank]}) "
        if fate is not None or rank in self.neighbours:
            return fate
        fate = self.verdict.text.removeprefix(prefix) if self.verdict else ""
        return fate if fate.startswith(("was killed", "exited", "is gone", "cannot")) else None

    def diagnose(self, members: Sequence[int], error: BaseException) -> Verdict:
        """The verdict after a connection within ``members`` broke: the lost rank and the reason."""
        deadline, others = time.monotonic() + _GRACE, [m for m in members if m != self.rank]
        while time.monotonic() < deadline:
            if verdict := self.find(others):
                return verdict
            time.sleep(0.02)
        reports = self.reports()
        silent = "; ".join(f"rank {m}{self.state(m, reports)}" for m in others)
        text = f"a rank of group {list(members)} is lost: {silent}: {error}\n{self._store.trouble}"
        return self.post(Verdict("lost", text.rstrip()))

    def reports(self) -> dict[int, RankReport]:
        """The last published report of each rank, and this rank's own as it is now."""
        ranks, nothing = range(len(self.peers)), dict[int, RankReport]()
        published = self._ask(lambda: self._store.reports(ranks), nothing)
        return {r: published.get(r, RankReport()) for r in ranks} | {self.rank: self.recorder.report()}

    def state(self, rank: int, reports: Mapping[int, RankReport]) -> str:
        """A description of a rank that does not come, as the end of a sentence."""
        peer, fate, at = self.peers[rank], self._fate(rank), reports[rank].at
        if rank == self.rank:
            return ""
        if fate is not None:
            return f" ({peer} {fate})"
        if rank in self._near.stopped() or any(rank in other.stopped for other in reports.values()):
            return f" ({peer} is stopped, by SIGSTOP or a debugger)"
        if not at:
            return f" ({peer}, of which no report has come)"
        silent = time.time() - at
        return f" ({peer}, no sign of life for {silent:.0f} s)" if silent > _SILENT else ""

    def _ask(self, fn: Callable[[], T], default: T) -> T:
        """Call ``fn`` in the monitor's thread; return ``default`` if the store does not answer."""
        if self._closed or not self.is_alive() or threading.current_thread() is self:
            return default
        answer: Future[T] = Future()
        self._requests.put(lambda: answer.set_result(fn()))
        os.write(self._wake, b"x")
        try:
            return answer.result(_ANSWER)
        except FutureTimeout:
            self._store.trouble = "the job's store does not answer: its host may be stopped"
            return default

    def _excepthook(self, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        # torch's own hook may keep this one after close(), and a forked data loader inherits it
        if os.getpid() == self.peers[self.rank].pid and not self._closed:
            self.fail(error)
        with hold_lines():  # torch's hook prints to a sys.stderr of its own
            self._hook(kind, error, tb)

    def _at_exit(self) -> None:
        if os.getpid() == self.peers[self.rank].pid:
            self._ask(lambda: self._store.end(self.rank, "ended: its program finished or called sys.exit"), None)
            self.sever()

    # -- in either thread
    def _accept(self, verdict: Verdict) -> Verdict:
        if self.verdict is None:
            self._cut_at = time.monotonic() + _LINGER
            self.verdict = verdict
        return self.verdict

    def _lost(self, rank: int, fate: str) -> Verdict:
        return Verdict("lost", f"rank {rank} ({self.peers[rank]}) {fate}")

    def _fate(self, rank: int) -> str | None:
        return self.peers[rank].fate() if rank in self.neighbours else self._links.fates.get(rank)

    # -- in the monitor's own thread
    def run(self) -> None:
        # in this thread and not in the caller's: torch looks up the name of its peer's address, which takes
        # 5 s if no name server answers (seen in one connection of 25)
        self._store.open()
        self._near.watch(self._selector, self._died)
        self._links.watch(self._selector, self._unlinked)
        due = 0.0
        while not self._closed:
            if time.monotonic() >= due:
                self._beat()
                due = time.monotonic() + _BEAT
            # the other thread may set a cut meanwhile; the loop sees it within a beat
            for key, _ in self._selector.select(max(0.0, min(due, self._cut_at or due) - time.monotonic())):
                if key.data is None:
                    os.read(self._woken, 4096)
                    while not self._requests.empty():
                        self._requests.get()()
                else:
                    self._selector.unregister(key.fileobj)
                    ended, rank = key.data
                    ended(rank)
            if self._cut_at is not None and time.monotonic() >= self._cut_at:
                self.sever()
                self._cut_at = None
        if self._hosts and self.verdict is None:
            self._store.outlast(lambda: [r for r in range(1, len(self.peers)) if self._fate(r) is None])
        self._near.close()
        self._links.close()
        self._store.leave(self.rank)

    def _beat(self) -> None:
        report = self.recorder.report()
        stopped = self._near.stopped() if report.waiting else ()
        self._store.publish(self.rank, replace(report, at=time.time(), stopped=stopped))
        self._seen()
        for rank in self._near.dead():
            self._died(rank)
        if self.rank > 0:
            self._store.make_way(self.rank)

    def _seen(self) -> Verdict | None:
        verdict = self.verdict or self._store.verdict() or self._cut_off()
        return verdict and self._accept(verdict)

    def _cut_off(self) -> Verdict | None:
        """The verdict if the store's host does not answer: no other rank can send it to this one."""
        if self._store.place is None or not self._store.cut_off:
            return None
        rank = self._links.lose(self._store.place[0])
        return Verdict("lost", self._store.trouble) if rank is None else self._lost(rank, str(self._fate(rank)))

    def _unlinked(self, rank: int) -> None:
        """The connection to the first rank of another host ended. Fatal if nothing of that host answers."""
        if self._links.end(rank):
            self._judge(rank)
        elif self._store.ended(rank) is None and not self._store.left:  # nothing is wrong if os._exit(0) ended it
            self._tell(self._lost(rank, GONE))

    def _died(self, rank: int) -> None:
        """A neighbour's process ended. Fatal at once if it failed, and had not left the job before."""
        fate, ended, gone = self._fate(rank), self._store.ended(rank), self._lost(rank, GONE)
        if fate == GONE and ended is None and self.verdict in (None, gone) and not self._store.left:
            self._tell(gone)  # its launcher was faster; nothing is wrong if os._exit(0) ended it
        if fate in (None, CLEAN, GONE) or not (ended or "ended").startswith("ended"):
            return
        self._judge(rank)

    def _judge(self, rank: int) -> None:
        """The job is lost with ``rank``."""
        before, verdict = self.verdict, self._lost(rank, str(self._fate(rank)))
        verdict = self._accept(self._store.post(verdict) or verdict)
        if verdict is not before:
            self._tell(verdict)

    def _tell(self, verdict: Verdict) -> None:
        """Now: a launcher may end this rank before its error is printed. One rank of a host is enough."""
        alive = (r for r in self._near.ranks if self._fate(r) is None)
        if self.rank == next(alive, self.rank):
            log.error(verdict.text)

    def _look(self, ranks: Sequence[int]) -> Verdict | None:
        ended = [(r, cause) for r in ranks if (cause := self._store.ended(r)) is not None]
        for r, cause in sorted(ended, key=lambda item: not item[1].startswith("raised")):
            fate = self._fate(r)
            cause_known = cause.startswith("raised") or fate in (None, GONE)
            return self._seen() or self._lost(r, cause if cause_known else str(fate))
        return self._seen()
