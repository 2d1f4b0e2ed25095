"""What kernels say: this host's about its processes, and this one's threads and sockets; others' by answering."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...errors import described

_PROC = Path("/proc")
CLEAN = described(0)
GONE = "is gone (killed, or ended by os._exit)"
RANK_MEMORY = 200 << 20
"""Bytes that a rank needs before its first tensor: Python, torch and gloo (torch 2.13: 190 MB)."""
SECONDS = 8.0
"""Without an answer for so long, a host is cut off. Less where collectives wait for less."""

_PROBES = 4  # unanswered ones of the last three fifths of that time
_TRY = 1.0  # seconds for a new connection to a server whose last one broke


def available_memory() -> int | None:
    """Bytes available to new processes; None if the kernel does not report them."""
    with suppress(OSError):
        lines = (_PROC / "meminfo").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    return None


@dataclass(frozen=True)
class Identity:
    """One process. ``host``: an id of the set of processes that see each other's pids; empty without /proc. The start
    time distinguishes it from a later process with the same pid."""

    hostname: str
    host: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> Identity:
        pid, host = os.getpid(), ""
        with suppress(OSError):
            boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
            host = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        stat = _stat(pid)
        return cls(socket.gethostname(), host, pid, stat.started if stat else 0)

    def neighbour_of(self, other: Identity) -> bool:
        return bool(self.host) and self.host == other.host

    def fate(self) -> str | None:
        """None while the process runs, else how it ended, as far as the kernel still knows."""
        stat = _stat(self.pid)
        if stat is None or stat.started != self.started:
            return GONE
        # of a zombie the wait status is still readable: its parent has not waited for it yet
        return described(os.waitstatus_to_exitcode(stat.status)) if stat.state in "ZX" else None

    def stopped(self) -> bool:
        stat = _stat(self.pid)
        return stat is not None and stat.started == self.started and stat.state in "Tt"

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.hostname}"


class _Stat(NamedTuple):
    state: str
    started: int
    status: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name in parentheses may contain anything
    return _Stat(fields[0], int(fields[19]), int(fields[49]))  # fields 3, 22 and 52 of proc(5)


def sockets() -> frozenset[int]:
    """Inodes of this process's open sockets; empty where /proc cannot tell."""
    return frozenset(inode for _, inode in open_sockets())


def sever(inodes: Collection[int]) -> None:
    """Shut these sockets down, so that threads that wait on them get an error now: gloo has no abort, and its
    destructor, which joins them, would wait until the group's timeout."""
    for fd, inode in open_sockets():
        if inode not in inodes:
            continue
        # its owner may have closed it in between, or the other side; gloo aborts at an error from accept()
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if os.fstat(copy.fileno()).st_ino == inode and not listens:
                copy.shutdown(socket.SHUT_RDWR)


def open_sockets() -> list[tuple[int, int]]:
    """Descriptor and inode of each socket of this process."""
    descriptors = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # the descriptor of the listing itself
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                descriptors.append((int(name), int(target[8:-1])))
    return descriptors


def let_threads_finish(name: str, seconds: float) -> None:
    """Return when the native threads called ``name``, and those without a name of their own, have finished
    their work that needs the interpreter's lock, and at the latest after ``seconds``."""
    # Between two looks this thread gives the lock away. A thread that waits for it would run meanwhile, and be
    # running or have switched at the second look.
    deadline, before = time.monotonic() + seconds, _native_threads(name)
    while before and time.monotonic() < deadline:
        time.sleep(0.001)
        now = _native_threads(name)
        if now == before and all(state == "S" for state, *_ in now.values()):
            return
        before = now


def _native_threads(name: str) -> dict[int, tuple[str | None, ...]]:
    """State and switches of these threads, by id; none where /proc cannot tell."""
    pythons = {thread.native_id for thread in threading.enumerate()}
    names, threads = {name, _status(os.getpid()).get("Name", name)}, dict[int, tuple[str | None, ...]]()
    with suppress(OSError):
        for task in map(int, os.listdir("/proc/self/task")):
            status = {} if task in pythons else _status(task)
            if status.get("Name") in names:
                counts = map(status.get, ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"))
                threads[task] = (status["State"][0], *counts)
    return threads


def _status(task: int) -> dict[str, str]:
    """The fields of proc(5) about one of this process's threads; none once it has ended."""
    try:
        lines = (_PROC / f"self/task/{task}/status").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


class LocalRanks:
    """Watches the processes of this host's ranks. ``rank``: this process. ``ranks``: all on its host."""

    def __init__(self, rank: int, peers: Sequence[Identity]) -> None:
        self._rank, self._peers = rank, peers
        self.ranks = [r for r, p in enumerate(peers) if p.neighbour_of(peers[rank]) or r == rank]
        self._unwatched, self._watched = list[int](), list[int]()

    def stopped(self) -> tuple[int, ...]:
        """The other ranks whose processes a signal or a debugger has stopped."""
        return tuple(r for r in self.ranks if r != self._rank and self._peers[r].stopped())

    def watch(self, selector: selectors.BaseSelector, died: Callable[[int], None]) -> None:
        """Call ``died`` when a process ends, early enough to read its exit status before its parent does."""
        for rank in self.ranks:
            if rank != self._rank:
                try:
                    self._watched.append(os.pidfd_open(self._peers[rank].pid))
                except (AttributeError, OSError):  # an old Python or kernel, or dead already
                    self._unwatched.append(rank)
                else:
                    selector.register(self._watched[-1], selectors.EVENT_READ, (died, rank))

    def dead(self) -> list[int]:
        """The ranks that ``watch`` could not watch and that have ended since the last call."""
        dead = [r for r in self._unwatched if self._peers[r].fate() is not None]
        self._unwatched = [r for r in self._unwatched if r not in dead]
        return dead

    def close(self) -> None:
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()


def keep_alive(s: socket.socket, seconds: float) -> None:
    """Have the kernel end the connection once the other host has not answered for ``seconds``. Kernels answer for
    processes that are stopped or compute, so silence is that of a host or of the link."""
    whole = max(3, round(seconds))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"KEEPIDLE": max(1, whole * 2 // 5), "KEEPINTVL": max(1, whole * 3 // 5 // _PROBES), "KEEPCNT": _PROBES}
    options["USER_TIMEOUT"] = whole * 1000  # for bytes under way, during which there are no probes
    for name, value in options.items():
        if hasattr(socket, f"TCP_{name}"):  # Linux has all of them
            s.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


def keep_alive_towards(port: int, seconds: float) -> None:
    """The same for all connections that this process has to a server at ``port``, whoever made them."""
    for _, s in connections(port):
        with suppress(OSError):
            if s.getpeername()[1] == port:
                keep_alive(s, seconds)


def connections(port: int) -> Iterator[tuple[int, socket.socket]]:
    """Inode and a copy of each connection of this process with a server at ``port``, which may be its own."""
    for fd, inode in open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as s:
            inet = s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM
            if inet and port in (s.getpeername()[1], s.getsockname()[1]):
                yield inode, s


def answers(host: str, port: int) -> bool:
    """Whether the kernel of ``host`` answers, be it that nobody listens any more."""
    try:
        socket.create_connection((host, port), _TRY).close()
    except OSError as e:
        return isinstance(e, ConnectionRefusedError)
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
        error = None
        with self._sockets.pop(rank) as s:
            try:
                s.recv(1)
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
        why = f"cannot be reached: its host has not answered for {self._seconds:g} s, it is down or cut off"
        for rank in ranks:
            others = ", ".join(str(r) for r in ranks if r != rank)
            self.fates[rank] = f"{why}; rank {others} is there too" if others else why
        return ranks[0] if ranks else None

    def close(self) -> None:
        for s in self._sockets.values():
            s.close()
        self._sockets.clear()
