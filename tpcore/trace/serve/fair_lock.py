"""A first-in first-out lock. threading.Lock does not guarantee an order."""

from __future__ import annotations

from collections import deque
from threading import Lock


class FairLock:
    """A context manager. Costs almost nothing without contention."""

    def __init__(self) -> None:
        self._lock, self._taken = Lock(), False
        self._waiting: deque[Lock] = deque()  # one lock per waiting thread; releasing it passes FairLock on

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()
        except BaseException:
            with self._lock:
                handed_over = mine not in self._waiting
                if not handed_over:
                    self._waiting.remove(mine)
            if handed_over:
                self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
