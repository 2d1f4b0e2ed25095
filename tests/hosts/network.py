"""Hosts on one machine: network namespaces joined by a switch, each with processes and a name of its own."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType

_NUMBERS = itertools.count()
_NEWNET, _NEWNS, _NEWUTS, _NEWPID = 0x40000000, 0x20000, 0x4000000, 0x20000000  # <linux/sched.h>
_PRIVATE = 0x40000 | 0x4000  # MS_PRIVATE | MS_REC of <linux/mount.h>
_BIND = 4096
_NOBODY = "02:00:00:00:00:ff"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@cache
def why_not() -> str:
    """Why this machine cannot have hosts in it; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs ip of iproute2"
    _remove_left()
    try:
        with Network(2):
            return ""
    except OSError as e:
        return f"this kernel or container has no network namespaces with links: {e}"


def _remove_left() -> None:
    """Remove the networks of processes that ended without doing so: a time limit of pytest ends one."""
    for path in Path("/run/netns").glob("tpcore*"):
        owner = re.match(r"tpcore(\d+)n", path.name)
        if owner and not Path("/proc", owner[1]).exists():
            with suppress(OSError):  # another process was faster
                _ip("netns", "del", path.name)


class Network:
    """``count`` hosts, ``hosta`` and on, at 10.77.0.1 and on. ``enter`` puts processes on them."""

    def __init__(self, count: int) -> None:
        self._stem = f"tpcore{os.getpid()}n{next(_NUMBERS)}"
        self._switch = f"{self._stem}switch"
        self.names = [f"host{chr(ord('a') + i)}" for i in range(count)]
        self._made: list[str] = []

    def __enter__(self) -> Network:
        try:
            self._make(self._switch)
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for i, name in enumerate(self.names):
                self._join(i, name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _join(self, i: int, name: str) -> None:
        there = self._of(name)
        self._make(there)
        at = ("-n", self._switch, "link")
        _ip(*at, "add", name, "type", "veth", "peer", "name", "eth0", "netns", there)
        _ip(*at, "set", name, "master", "bridge", "up")
        _ip("-n", there, "addr", "add", f"{address(i)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", there, "link", "set", device, "up")

    def _make(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._made.append(namespace)

    def _of(self, name: str) -> str:
        return f"{self._stem}{name}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._made:
            _ip("netns", "del", self._made.pop())

    # -- what may happen to it ----------------------------------------------------------------------------
    def cut(self, host: int) -> None:
        """Its cable is out, at the switch: the host itself sees nothing."""
        _ip("-n", self._switch, "link", "set", self.names[host], "nomaster")

    def swallow(self, source: int, target: int) -> None:
        """Packets from one to the other are lost, and those of the other direction arrive."""
        there = self._of(self.names[source])
        _ip("-n", there, "neigh", "replace", address(target), "lladdr", _NOBODY, "nud", "permanent", "dev", "eth0")

    def slow(self, host: int, rate: str) -> None:
        """What it sends goes at so many bits a second. OSError where the kernel has no token bucket."""
        words = ["tc", "-n", self._of(self.names[host]), "qdisc", "add", "dev", "eth0", "root", "tbf"]
        done = subprocess.run(
            [*words, "rate", rate, "burst", "32kb", "latency", "2s"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise OSError(f"tc: {done.stderr.strip()}")

    # -- in a process -------------------------------------------------------------------------------------
    def enter(self, host: int, hosts_file: str) -> int:
        """Move this process to a host. Returns 0 in a child, which is the first process there, and the
        child's pid here; the child ends with this process."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self._of(self.names[host])}") as f:
            _check(libc.setns(f.fileno(), _NEWNET))
        _check(libc.unshare(_NEWNS | _NEWUTS | _NEWPID))
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            _check(libc.mount(None, b"/", None, _PRIVATE, None))
            _check(libc.mount(b"proc", b"/proc", b"proc", 0, None))
            _check(libc.mount(hosts_file.encode(), b"/etc/hosts", None, _BIND, None))
            # no name server: one that cannot be reached is asked for seconds
            _check(libc.mount(b"/dev/null", b"/etc/resolv.conf", None, _BIND, None))
            name = self.names[host].encode()
            _check(libc.sethostname(name, len(name)))
        return pid

    def hosts_file(self) -> str:
        """The text of /etc/hosts."""
        lines = [f"{address(i)} {name}" for i, name in enumerate(self.names)]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])


def end_with_parent() -> None:
    """Be killed when the thread that forked this process ends."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
