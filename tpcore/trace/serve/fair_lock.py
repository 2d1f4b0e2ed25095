"""A lock that is given in the order in which it was asked for, which threading.Lock does not promise."""

from __future__ import annotations

from collections import deque
from threading import Lock


class FairLock:
    """For a with block. Costs next to nothing where nobody else asks."""

    def __init__(self) -> None:
        self._lock, self._taken = Lock(), False
        self._waiting: deque[Lock] = deque()  # a lock of each; to release it is to hand this one over

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
