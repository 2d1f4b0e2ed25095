"""The watch over collectives that a GPU's stream waits for while the host runs ahead."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tpcore.c10d.supervision.waiting import Waiting

_LOOK = 0.2  # seconds between two looks: a thousandth of the time-out by default


class Queue(threading.Thread):
    """Ends the job with a verdict if a collective is not complete ``timeout`` seconds after the one before it.

    A host that reads a value waits in the driver, for a kernel that waits for another rank, and cannot look
    itself. After the verdict the job's monitor aborts the communicators: the kernel ends, the read returns, and
    the next collective raises the verdict.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__(name="tpcore queue", daemon=True)
        self._timeout, self._ended = timeout, threading.Event()
        self._under_way: deque[tuple[Waiting, Callable[[], bool]]] = deque()
        # an interpreter that ends would end this thread inside a call of the driver
        atexit.register(self.close)

    def finish(self, watch: Waiting, work: Any) -> None:
        """Let the current stream wait for ``work``. Returns at once."""
        watch.finish(work)
        if torch.cuda.is_current_stream_capturing():  # nothing runs yet
            return
        # an event and not the work, which would keep its tensors alive
        event = torch.cuda.Event()
        event.record()
        self.follow(watch, event.query)

    def follow(self, watch: Waiting, done: Callable[[], bool]) -> None:
        self._under_way.append((watch, done))

    def run(self) -> None:
        since = time.monotonic()
        while not self._ended.wait(_LOOK):
            while self._under_way and self._under_way[0][1]():
                self._under_way.popleft()
                since = time.monotonic()
            if not self._under_way:
                since = time.monotonic()
            elif time.monotonic() - since > self._timeout:
                self._under_way[0][0].expire()
                return

    def close(self) -> None:
        atexit.unregister(self.close)
        self._ended.set()
        self.join()
        self._under_way.clear()
