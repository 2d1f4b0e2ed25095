"""Calls that one thread makes in another, which waits for them and for other descriptors at once."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Requests:
    """``fd`` can be read when there is something to answer."""

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

    def taken(self) -> None:
        """The other thread has woken up."""
        os.read(self.fd, 4096)

    def answer(self) -> None:
        """Answer the requests that have come, in the other thread."""
        while not self._waiting.empty():
            self._waiting.get()()

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write)
