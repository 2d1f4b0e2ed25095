"""A word of each call, exchanged by the members of a group over connections of their own.

A group's own collectives cannot carry it: where calls differ, gloo mixes up their data, waits, or aborts the
process. A word is sent without waiting, and is read when it is there, so a call costs two system calls for
each other member and no wake-up.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta

import torch.distributed as dist

from ...calls import Call, Places, disagreement, place_of, unexplained, word_of
from ...errors import BackendError, CollectiveMismatchError
from .flight_recorder import Entry

_FRAME = struct.Struct("<QQ")
_TEXT_NEXT = b"\xff" * _FRAME.size  # no hash of 128 bits
_TEXT = 4096
_KEPT = 4096  # frames of calls that were made before

Meet = Callable[[str], list[str]]
"""Every member's text, in the group's order; collective."""


class Words:
    """``sockets`` by position in the group of ``members``. ``lag``: calls that may be under way before the
    words of the first are waited for. ``strict``: a call from another place is another call."""

    def __init__(
        self,
        members: Sequence[int],
        position: int,
        sockets: Mapping[int, socket.socket],
        lag: int,
        strict: bool,
    ) -> None:
        self._members, self._position, self._sockets = tuple(members), position, dict(sockets)
        self._lag, self._strict, self._places = lag, strict, Places()
        self._sent: deque[tuple[bytes, Entry]] = deque()
        self._got = {peer: bytearray() for peer in sockets}
        self._frames: dict[object, tuple[bytes, object]] = {}
        self._poll = select.poll()
        for s in sockets.values():
            self._poll.register(s, select.POLLIN)

    def say(self, entry: Entry) -> None:
        """This rank is about to make the call of ``entry``."""
        frame = self._frame(entry)
        self._sent.append((frame, entry))
        self._send(frame)

    def due(self, now: bool) -> bool:
        """Whether words have to be waited for: of all calls, if ``now``."""
        most = 0 if now else self._lag
        return any(self._behind(peer) > most for peer in self._got)

    @property
    def settled(self) -> bool:
        """Whether all calls of this rank were compared."""
        return not self._sent

    def differing(self) -> tuple[Entry, bool] | None:
        """The first call that ranks have made differently, and whether only its place differs. Of what was
        read; each call is looked at once."""
        size = _FRAME.size
        while self._sent and all(len(got) >= size for got in self._got.values()):
            mine, entry = self._sent.popleft()
            frames = {peer: bytes(got[:size]) for peer, got in self._got.items()} | {self._position: mine}
            for got in self._got.values():
                del got[:size]
            pairs = [_FRAME.unpack(frames[i]) for i in sorted(frames)]
            if any(word != pairs[0][0] for word, _ in pairs):
                return entry, False
            places = [place for _, place in pairs]
            if (self._strict and len(set(places)) > 1) or self._places.swapped(sorted(frames), places):
                return entry, True
        return None

    def error(
        self, entry: Entry, place: bool, arrive: Callable[[WordsAwaited], None]
    ) -> CollectiveMismatchError:
        """All members come here, for the same call: each tells what it is."""
        call = Call.of(*entry[1:])
        self._send(_TEXT_NEXT + call.pack().ljust(_TEXT))
        calls, ended = {self._position: call}, []
        for peer in list(self._got):
            arrive(WordsAwaited(self, peer))
            text = self._text(peer)
            self._sent.clear()
            if text is None:
                ended.append(self._members[peer])
            else:
                calls[peer] = Call.unpack(text)
        order = sorted(calls)
        ranks = [self._members[i] for i in order]
        message = disagreement([calls[i] for i in order], ranks, place)
        if message is None and ended:
            message = (
                f"ranks {ranks} and {ended} of group {self._members} disagree on a collective, and of "
                f"{ended} the process has ended:\n  rank {ranks[0]}: {call}"
            )
        return CollectiveMismatchError(message or unexplained([call]))

    def close(self) -> None:
        for peer in list(self._sockets):
            self._drop(peer)

    # -- one peer -----------------------------------------------------------------------------------------
    def has_text(self, peer: int) -> bool:
        """Whether the text of a peer has come, or will not come any more."""
        at = self._text_at(peer)
        return peer not in self._sockets or (at is not None and len(self._got[peer]) >= at + _TEXT)

    def wait(self, seconds: float) -> None:
        self._poll.poll(seconds * 1e3)

    def _text_at(self, peer: int) -> int | None:
        """Where its text begins; words of later calls may come before."""
        got, size = self._got[peer], _FRAME.size
        marks = (i for i in range(0, len(got) - size + 1, size) if got[i : i + size] == _TEXT_NEXT)
        found = next(marks, None)
        return None if found is None else found + size

    def _text(self, peer: int) -> bytes | None:
        got, at = self._got[peer], self._text_at(peer)
        if at is None or len(got) < at + _TEXT:
            return None
        text = bytes(got[at : at + _TEXT])
        del got[: at + _TEXT]  # with the words of calls that will not be made
        return text

    def _behind(self, peer: int) -> int:
        """Calls of this rank of which the word of ``peer`` is missing."""
        return len(self._sent) - len(self._got[peer]) // _FRAME.size

    # -- bytes --------------------------------------------------------------------------------------------
    def _frame(self, entry: Entry) -> bytes:
        _, _, op, shape, dtype, site = entry
        code, line = site if site is not None else (None, 0)
        key = op, shape, dtype, id(code), line  # the id: code is slow to hash, and lives as long as the entry
        found = self._frames.get(key)
        if found is None:
            if len(self._frames) >= _KEPT:
                self._frames.clear()
            place = 0 if site is None else place_of(op, site)
            found = self._frames[key] = _FRAME.pack(word_of((op, tuple(shape), dtype)), place), code
        return found[0]

    def _send(self, data: bytes) -> None:
        for peer, s in list(self._sockets.items()):
            try:
                s.send(data)  # never in parts: what is not read yet is far less than a socket takes
            except OSError:
                self._drop(peer)

    def read(self) -> None:
        """What has come by now."""
        for peer, s in list(self._sockets.items()):
            try:
                data = s.recv(1 << 13)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if data:
                self._got[peer] += data
            else:
                self._drop(peer)

    def _drop(self, peer: int) -> None:
        """Its process has ended, or left the job. The group's own collectives say so."""
        s = self._sockets.pop(peer)
        self._poll.unregister(s)
        s.close()

    def lost(self) -> list[int]:
        """Positions of those whose words will not come."""
        return [p for p in self._got if p not in self._sockets and self._behind(p) > 0]


class WordsAwaited:
    """The words of all members, or the text of one, as what ``Waiting`` waits for."""

    def __init__(self, words: Words, peer: int | None = None, now: bool = True) -> None:
        self._words, self._peer, self._now = words, peer, now

    def is_completed(self) -> bool:
        self._words.read()
        if self._peer is not None:
            return self._words.has_text(self._peer)
        return not self._words.due(self._now) or bool(self._words.lost())

    def wait(self, limit: timedelta = timedelta(days=1)) -> None:
        until = time.monotonic() + limit.total_seconds()
        while not self.is_completed():
            left = until - time.monotonic()
            if left <= 0:
                raise RuntimeError("not yet")
            self._words.wait(left)
        if self._peer is None and self._words.lost():
            raise dist.DistNetworkError("a connection over which calls are compared was closed")


def connected(
    position: int, size: int, address: str, timeout: float, meet: Meet, remedy: str = ""
) -> dict[int, socket.socket]:
    """A connection to each other member, by position. Collective. ``address``: of this host, to its peers.
    BackendError, which ends in ``remedy``, where hosts take no connections."""
    secret = uuid.uuid4().bytes
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as undo, socket.create_server((address, 0), family=family, backlog=size) as server:
        server.settimeout(timeout)
        found = meet(json.dumps([address, server.getsockname()[1], secret.hex()]))
        made: dict[int, socket.socket] = {}
        try:
            for peer in range(position):
                host, port, theirs = json.loads(found[peer])
                made[peer] = undo.enter_context(socket.create_connection((host, port), timeout))
                made[peer].sendall(bytes.fromhex(theirs) + position.to_bytes(4, "little"))
            while len(made) < size - 1:
                s = undo.enter_context(server.accept()[0])
                s.settimeout(timeout)
                hello = s.recv(20, socket.MSG_WAITALL)
                if hello[:16] == secret:  # else of somebody who is no member
                    made[int.from_bytes(hello[16:], "little")] = s
        except OSError as e:
            raise BackendError(
                f"ranks cannot connect to each other (this one is at {address}): {e}; hosts have to take "
                f"connections of each other at any port{remedy}"
            ) from e
        for s in made.values():
            s.setblocking(False)
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        undo.pop_all()
    return made
