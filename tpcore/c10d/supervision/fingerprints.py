"""Fingerprints of calls, which the members of a group exchange over connections of their own: in the group, calls that
differ have their data mixed up, wait, or abort. A fingerprint is two system calls for each other member, no wake-up."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import wait
from typing import cast

import torch.distributed as dist

from ...comm.signature import Call, Places, disagreement, place_of, word_of
from ...errors import BackendError, CollectiveMismatchError
from .status import EnteredCall

_FRAME = struct.Struct("<QQ")
_TEXT_NEXT = b"\xff" * _FRAME.size  # a mark before a text; equals no frame
_TEXT = 4096
_CACHE_SIZE = 4096  # cached frames
_GREETING = 20  # bytes: a secret of 16, and the position

Meet = Callable[[str], list[str]]
"""Gathers the members' texts, in the group's order; collective."""


class FingerprintExchange:
    """``sockets``: by position in the group of ``members``. ``lag``: calls that may be under way before this rank waits
    for the fingerprints of the first. ``strict``: equal calls from different places differ."""

    def __init__(
        self, members: Sequence[int], position: int, sockets: Mapping[int, socket.socket], lag: int, strict: bool
    ) -> None:
        self._members, self._position, self._sockets = tuple(members), position, dict(sockets)
        self._lag, self._strict, self._places = lag, strict, Places()
        self.sent: deque[tuple[bytes, EnteredCall]] = deque()  # calls of this rank that have not been compared
        self._buffers = {peer: bytearray() for peer in sockets}
        self._frames: dict[object, tuple[bytes, object]] = {}
        self._poll = select.poll()
        for s in sockets.values():
            self._poll.register(s, select.POLLIN)

    def say(self, entry: EnteredCall) -> None:
        """Send the fingerprint of ``entry``, the call that this rank is about to make."""
        frame = self._frame(entry)
        self.sent.append((frame, entry))
        self._send(frame)

    def arrived(self, now: bool) -> bool:
        """Read, and whether all fingerprints have come that this rank waits for. DistNetworkError if they cannot."""
        self.read()
        calls = len(self.sent) - (0 if now else self._lag)
        late = [peer for peer, buffer in self._buffers.items() if len(buffer) // _FRAME.size < calls]
        if any(peer not in self._sockets for peer in late):
            raise dist.DistNetworkError("a connection over which calls are compared was closed")
        return not late

    def differing(self) -> tuple[EnteredCall, bool] | None:
        """The first call that differs, of those not compared yet, and whether only its place differs."""
        size = _FRAME.size
        while self.sent and all(len(buffer) >= size for buffer in self._buffers.values()):
            frame, entry = self.sent.popleft()
            frames = {peer: bytes(buffer[:size]) for peer, buffer in self._buffers.items()} | {self._position: frame}
            for buffer in self._buffers.values():
                del buffer[:size]
            pairs = [_FRAME.unpack(frames[i]) for i in sorted(frames)]
            if any(fingerprint != pairs[0][0] for fingerprint, _ in pairs):
                return entry, False
            places = [place for _, place in pairs]
            if (self._strict and len(set(places)) > 1) or self._places.swapped(sorted(frames), places):
                return entry, True
        return None

    def error(
        self, entry: EnteredCall, place: bool, arrive: Callable[[Callable[[], bool]], None]
    ) -> CollectiveMismatchError:
        """The error about ``entry``. All members call this for the same call and exchange their texts."""
        call = Call.of(*entry[1:])
        self._send(_TEXT_NEXT + call.pack().ljust(_TEXT))
        calls, ended = {self._position: call}, []
        for peer, buffer in self._buffers.items():
            arrive(partial(self.has_text, peer))
            end = self._text_end(peer)
            self.sent.clear()
            if end is None:
                ended.append(self._members[peer])
            else:
                calls[peer] = Call.unpack(bytes(buffer[end - _TEXT : end]))
                del buffer[:end]  # including the fingerprints of calls that will not run
        ranks = [self._members[i] for i in sorted(calls)]
        gone = f"ranks {ranks} and {ended} of group {self._members} disagree on a collective, and of {ended} the "
        gone += f"process has ended:\n  rank {ranks[0]}: {call}"
        ordered = [calls[i] for i in sorted(calls)]
        return CollectiveMismatchError(disagreement(ordered, ranks, place, gone if ended else ""))

    def close(self) -> None:
        for peer in list(self._sockets):
            self._drop(peer)

    def has_text(self, peer: int) -> bool:
        """Read, and whether the text of a peer has arrived or cannot arrive any more."""
        self.read()
        return peer not in self._sockets or self._text_end(peer) is not None

    def wait(self, seconds: float) -> None:
        self._poll.poll(seconds * 1e3)

    def _text_end(self, peer: int) -> int | None:
        """Where the peer's text ends, behind fingerprints of later calls; None while it is not all there."""
        buffer, size = self._buffers[peer], _FRAME.size
        marks = (i for i in range(0, len(buffer) - size + 1, size) if buffer[i : i + size] == _TEXT_NEXT)
        end = next(marks, len(buffer)) + size + _TEXT
        return end if end <= len(buffer) else None

    def _frame(self, entry: EnteredCall) -> bytes:
        _, _, op, shape, dtype, site = entry
        code, *rest = site if site is not None else (None,)
        key = op, shape, dtype, id(code), *rest  # the id: code is slow to hash, and lives as long as the entry
        cached = self._frames.get(key)
        if cached is None:
            if len(self._frames) >= _CACHE_SIZE:
                self._frames.clear()
            place = 0 if site is None else place_of(op, site)
            cached = self._frames[key] = _FRAME.pack(word_of((op, tuple(shape), dtype)), place), code
        return cached[0]

    def _send(self, data: bytes) -> None:
        for peer, s in list(self._sockets.items()):
            try:
                s.send(data)  # never partial: the unread data is far less than a socket's buffer
            except OSError:
                self._drop(peer)

    def read(self) -> None:
        """Read the fingerprints that have arrived."""
        for peer, s in list(self._sockets.items()):
            try:
                data = s.recv(1 << 13)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            self._buffers[peer] += data
            if not data:
                self._drop(peer)

    def _drop(self, peer: int) -> None:
        """Close the connection: the peer has ended or left the job, which its collectives will report."""
        with self._sockets.pop(peer) as s:
            self._poll.unregister(s)


def _members(server: socket.socket, secret: bytes, count: int, timeout: float) -> Iterator[tuple[int, socket.socket]]:
    """Position and connection of ``count`` members as they greet. Others, as of who scans ports, are not waited for."""
    deadline, greetings = time.monotonic() + timeout, dict[socket.socket, bytes]()
    server.setblocking(False)
    try:
        while count:
            remaining = deadline - time.monotonic()
            ready = wait([server, *greetings], remaining) if remaining > 0 else []
            if not ready:
                raise TimeoutError("timed out")
            for s in cast(list[socket.socket], ready):
                if s is server:
                    with suppress(OSError):  # the connection is gone already
                        greetings[server.accept()[0]] = b""
                    continue
                data = b""
                with suppress(OSError):
                    data = s.recv(_GREETING - len(greetings[s]))
                greetings[s] += data
                if data and len(greetings[s]) < _GREETING:
                    continue
                greeting = greetings.pop(s)
                if data and greeting[:16] == secret:
                    count -= 1
                    yield int.from_bytes(greeting[16:], "little"), s
                else:
                    s.close()
    finally:
        for s in greetings:
            s.close()


def connected(
    position: int, size: int, address: str, timeout: float, meet: Meet, remedy: str = ""
) -> dict[int, socket.socket]:
    """A connection to each other member, by position. Collective. ``address``: of this host, to its peers.
    BackendError, which ends in ``remedy``, where hosts take no connections."""
    secret = uuid.uuid4().bytes
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as undo, socket.create_server((address, 0), family=family, backlog=size) as server:
        addresses = meet(json.dumps([address, server.getsockname()[1], secret.hex()]))
        connections: dict[int, socket.socket] = {}
        try:
            for peer in range(position):
                host, port, peer_secret = json.loads(addresses[peer])
                connections[peer] = undo.enter_context(socket.create_connection((host, port), timeout))
                connections[peer].sendall(bytes.fromhex(peer_secret) + position.to_bytes(4, "little"))
            for peer, s in _members(server, secret, size - 1 - position, timeout):
                connections[peer] = undo.enter_context(s)
        except OSError as e:
            text = f"ranks cannot connect to each other (this one is at {address}): {e}; hosts have to take"
            raise BackendError(f"{text} connections of each other at any port{remedy}") from e
        for s in connections.values():
            s.setblocking(False)
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        undo.pop_all()
    return connections
