"""The status that ranks publish at the job's store: their last calls, how they ended, the job's verdict."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from .flight_recorder import RankReport, Verdict
from .links import SECONDS, answers, keep_alive_towards

T = TypeVar("T")


class StatusStore:
    """Used by one thread. Once the store is gone it says nothing and ``trouble`` why, which is no alarm by
    itself: whoever hosts the store may simply have finished first. ``cut_off``: its host does not answer."""

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        folder: Path | None = None,
        place: tuple[str, int] | None = None,
        seconds: float = SECONDS,
    ) -> None:
        """``folder``: for reports, where the store is a file: that one would grow by each report. ``place``:
        host and port of a server. ``seconds``: for which its host may be silent."""
        self._connect, self._folder, self._seconds, self.place = connect, folder, seconds, place
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
        found = {r: self._report(r) for r in ranks}
        return {r: RankReport.unpack(data) for r, data in found.items() if data}

    def _report(self, rank: int) -> str | None:
        if self._folder is None:
            return self._get(f"report/{rank}")
        with suppress(OSError):
            return (self._folder / str(rank)).read_text()
        return None

    def leave(self, rank: int) -> None:
        """Remove the reports of ``rank``, which no rank needs any more."""
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / str(rank)).unlink()
                self._folder.rmdir()  # succeeds for the last rank

    def post(self, verdict: Verdict) -> Verdict | None:
        """Post ``verdict`` unless there is one; return the job's verdict, or None without a store."""
        return _verdict(self._first("verdict", json.dumps(asdict(verdict))))

    def verdict(self) -> Verdict | None:
        return _verdict(self._get("verdict"))

    def end(self, rank: int, how: str) -> None:
        """Publish ``how`` a rank ended; the first call counts."""
        self._first(f"end/{rank}", how)

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


class Requests:
    """Calls that other threads make in the one that uses the store. ``fd`` can be read when one has come."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def ask(self, fn: Callable[[], T], seconds: float) -> T:
        """Call ``fn`` in the other thread and return its result. Raises concurrent.futures.TimeoutError."""
        answer: Future[T] = Future()
        self._waiting.put(lambda: answer.set_result(fn()))
        self.wake()
        return answer.result(seconds)

    def wake(self) -> None:
        os.write(self._write, b"x")

    def answer(self) -> None:
        """Answer the requests that have come, in the other thread, once ``fd`` can be read."""
        os.read(self.fd, 4096)
        while not self._waiting.empty():
            self._waiting.get()()

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write)


def _verdict(data: str | None) -> Verdict | None:
    return Verdict(**json.loads(data)) if data else None
