"""The kernel's information about the ranks on this host, and about this process's sockets."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
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


def available_memory() -> int | None:
    """Bytes available to new processes; None if the kernel does not report them."""
    with suppress(OSError):
        lines = (_PROC / "meminfo").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    return None


def _host() -> str:
    """An id of the set of processes that see each other's pids; empty without /proc."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class Identity:
    """One process. Its start time distinguishes it from a later process with the same pid."""

    hostname: str
    host: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> Identity:
        pid = os.getpid()
        stat = _stat(pid)
        return cls(socket.gethostname(), _host(), pid, stat.started if stat else 0)

    def neighbour_of(self, other: Identity) -> bool:
        return bool(self.host) and self.host == other.host

    def fate(self) -> str | None:
        """None while the process runs, else how it ended, as far as the kernel still knows."""
        stat = _stat(self.pid)
        if stat is None or stat.started != self.started:
            return GONE
        if stat.state not in "ZX":
            return None
        # a zombie: its parent has not waited for it yet, so the wait status is still readable
        return described(os.waitstatus_to_exitcode(stat.status))

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
    """Inodes of the sockets this process has open; empty where /proc cannot tell."""
    return frozenset(inode for _, inode in open_sockets())


def sever(inodes: Collection[int]) -> None:
    """Shut these sockets down, so that threads that wait on them get an error now: gloo has no abort, and its
    destructor, which joins them, would wait until the group's timeout."""
    for fd, inode in open_sockets():
        if inode not in inodes:
            continue
        # its owner may have closed it in between, or the other side
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            # gloo treats an error from accept() as a broken invariant and aborts the process
            listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if os.fstat(copy.fileno()).st_ino == inode and not listens:
                copy.shutdown(socket.SHUT_RDWR)


def open_sockets() -> list[tuple[int, int]]:
    """Descriptor and inode of each socket of this process."""
    found = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # the descriptor of the listing itself
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found.append((int(name), int(target[8:-1])))
    return found


def let_threads_finish(name: str, seconds: float) -> None:
    """Return when the native threads called ``name``, and those without a name of their own, have finished
    their work that needs the interpreter's lock, and at the latest after ``seconds``."""
    # Between two looks this thread gives the lock away. A thread that waits for it would run meanwhile, and be
    # running or have switched at the second look.
    deadline, before = time.monotonic() + seconds, _native_threads(name)
    while before and time.monotonic() < deadline:
        time.sleep(0.001)
        now = _native_threads(name)
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now


def _native_threads(name: str) -> dict[int, tuple[str, str]]:
    """State and number of switches of these threads, by id; none where /proc cannot tell."""
    pythons = {thread.native_id for thread in threading.enumerate()}
    names, found = {name, _status(os.getpid()).get("Name", name)}, dict[int, tuple[str, str]]()
    with suppress(OSError):
        for task in map(int, os.listdir("/proc/self/task")):
            status = {} if task in pythons else _status(task)
            if status.get("Name") in names:
                switches = f"{status.get('voluntary_ctxt_switches')} {status.get('nonvoluntary_ctxt_switches')}"
                found[task] = status["State"][0], switches
    return found


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
        self._unwatched: list[int] = []
        self._watched: list[int] = []

    def fate(self, rank: int) -> str | None:
        """How the process of one of ``ranks`` ended; None while it lives."""
        return self._peers[rank].fate()

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
        found = [r for r in self._unwatched if self.fate(r) is not None]
        self._unwatched = [r for r in self._unwatched if r not in found]
        return found

    def close(self) -> None:
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()
