"""Connections of programs that do not belong to the job, while its ranks meet."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tpcore.c10d.supervision.fingerprints import connected
from tpcore.errors import BackendError


def _reset(s: socket.socket) -> None:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.close()


def _silent(s: socket.socket) -> None:
    pass


def _half(s: socket.socket) -> None:
    s.sendall(b"x" * 7)


def _other(s: socket.socket) -> None:
    s.sendall(b"GET / HTTP/1.0\r\n\r\nof another program")


def _closed(s: socket.socket) -> None:
    s.close()


@pytest.mark.parametrize("stranger", [_reset, _silent, _half, _other, _closed])
def test_a_stranger_neither_ends_nor_delays_the_start(stranger: Callable[[socket.socket], None]) -> None:
    size, texts, barrier = 3, dict[int, str](), threading.Barrier(3)

    def rank(position: int) -> dict[int, socket.socket]:
        def meet(text: str) -> list[str]:
            texts[position] = text
            host, port, _ = json.loads(text)
            for _ in range(3):  # before any member can know the port
                s = undo.enter_context(socket.create_connection((host, port)))
                stranger(s)
            barrier.wait(20)
            return [texts[i] for i in range(size)]

        return connected(position, size, "127.0.0.1", 20.0, meet)

    start = time.monotonic()
    with ExitStack() as undo, ThreadPoolExecutor(size) as pool:
        made = list(pool.map(rank, range(size)))
        for position, sockets in enumerate(made):
            assert sorted(sockets) == [i for i in range(size) if i != position]
            for peer, s in sockets.items():
                s.send(bytes([position, peer]))
        for position, sockets in enumerate(made):
            for peer, s in sockets.items():
                s.setblocking(True)
                assert s.recv(2) == bytes([peer, position])
                s.close()
    assert time.monotonic() - start < 10  # half of the time-out


def test_a_member_that_does_not_come_is_still_an_error() -> None:
    with pytest.raises(BackendError, match=r"ranks cannot connect to each other .*: timed out"):
        connected(0, 2, "127.0.0.1", 0.2, lambda text: [text, ""])
