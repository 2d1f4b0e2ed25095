"""Whether other hosts can be reached: what their kernels answer, whatever their processes do meanwhile."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from .host import GONE, open_sockets

SECONDS = 8.0
"""Without an answer for so long, a host is cut off. Less where collectives wait for less."""

_PROBES = 4  # unanswered ones of the last three fifths of that time
_TRY = 1.0  # seconds for a new connection to a server whose last one broke


def keep_alive(s: socket.socket, seconds: float) -> None:
    """Have the kernel end the connection once the other host has not answered for ``seconds``. Kernels answer for
    processes that are stopped or compute, so silence is that of a host or of the link."""
    whole = max(3, round(seconds))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, whole * 2 // 5)),
        ("TCP_KEEPINTVL", max(1, whole * 3 // 5 // _PROBES)),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", whole * 1000),  # for bytes under way, during which there are no probes
    ):
        if hasattr(socket, name):  # Linux has all of them
            s.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def keep_alive_towards(port: int, seconds: float) -> None:
    """The same for all connections that this process has to a server at ``port``, whoever made them."""
    for fd, _ in open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as s:
            inet = s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM
            if inet and s.getpeername()[1] == port:
                keep_alive(s, seconds)


def answers(host: str, port: int) -> bool:
    """Whether the kernel of ``host`` answers, be it that nobody listens any more."""
    try:
        socket.create_connection((host, port), _TRY).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


class Links:
    """A connection from the first rank of this host to the first rank of each other. Used by one thread.
    ``sockets``: by rank; none on the other ranks of a host. ``hosts``: the ranks at each address."""

    def __init__(
        self, sockets: Mapping[int, socket.socket], hosts: Mapping[str, Sequence[int]], seconds: float = SECONDS
    ) -> None:
        self._sockets, self._hosts, self._seconds = dict(sockets), hosts, seconds
        self.fates: dict[int, str] = {}
        for s in sockets.values():
            keep_alive(s, seconds)

    def watch(self, selector: selectors.BaseSelector, ended: Callable[[int], None]) -> None:
        """Have ``ended(rank)`` called when a connection has ended."""
        for rank, s in self._sockets.items():
            selector.register(s, selectors.EVENT_READ, (ended, rank))

    def end(self, rank: int) -> bool:
        """The connection to ``rank`` has ended: note why. Whether nothing of its host answers."""
        with self._sockets.pop(rank) as s:
            try:
                s.recv(1)
                error = None
            except OSError as e:
                error = e.errno
        if error in (None, errno.ECONNRESET, errno.EPIPE):
            self.fates[rank] = GONE
            return False
        self.lose(next(address for address, ranks in self._hosts.items() if rank in ranks))
        return True

    def lose(self, host: str) -> int | None:
        """Nothing answers at this address or name: note that, and return the first rank there."""
        addresses: set[str] = set()
        with suppress(OSError):  # of a name server that is cut off as well
            addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        ranks = next((ranks for address, ranks in self._hosts.items() if address in addresses), ())
        for rank in ranks:
            others = ", ".join(str(r) for r in ranks if r != rank)
            self.fates[rank] = (
                f"cannot be reached: its host has not answered for {self._seconds:g} s, it is down or cut off"
                + (f"; rank {others} is there too" if others else "")
            )
        return ranks[0] if ranks else None

    def close(self) -> None:
        for s in self._sockets.values():
            s.close()
        self._sockets.clear()
