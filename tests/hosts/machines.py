"""Ranks forked from a process that has torch in memory, and what became of each."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from helpers import programs as forked
from network import Network, address, end_with_parent

PORT = 29577


class Machine:
    """One host of ``network``, or this machine itself, and its ranks, numbered from ``first``."""

    def __init__(self, network: Network | None, host: int, home: Path, first: int, count: int) -> None:
        self.host, self.home, self.ranks = host, home, range(first, first + count)
        self._network = network
        self._process: Any = None

    def start(self, program: Callable[..., None], args: tuple[Any, ...], env: Mapping[str, str]) -> None:
        for rank in self.ranks:
            (self.home / f"ended{rank}").unlink(missing_ok=True)
        where = (self._network, self.host, self.home, self.ranks)
        self._process = forked.context().Process(target=_machine, args=(*where, dict(env), program, args))
        self._process.start()

    # -- faults -------------------------------------------------------------------------------------------
    def power_off(self) -> None:
        """All of its processes at once."""
        self._process.kill()

    def processes(self) -> list[psutil.Process]:
        """Those of the ranks that have not ended, in their order."""
        top = psutil.Process(self._process.pid).children()
        parent = top[0] if self._network is not None else psutil.Process(self._process.pid)
        return sorted(parent.children(), key=lambda p: (p.create_time(), p.pid))

    def kill(self, *which: int) -> None:
        """Ranks, by their number on this host; all without any."""
        found = self.processes()
        for p in [found[i] for i in which] or found:
            p.send_signal(signal.SIGKILL)

    def stop(self, which: int) -> None:
        self.processes()[which].send_signal(signal.SIGSTOP)

    def wait(self, seconds: float) -> None:
        """Until all have ended, but no longer."""
        self._process.join(seconds)

    # -- outcome ------------------------------------------------------------------------------------------
    def join(self, seconds: float) -> None:
        self._process.join(seconds)
        left = self._process.exitcode is None
        self._process.kill()
        self._process.join()
        assert not left, f"ranks of host {self.host} did not end: {[self.printed(r)[-2000:] for r in self.ranks]}"

    def ended(self, rank: int) -> tuple[int, float]:
        """Exit code, minus the signal if one killed it, and the time of its end."""
        code, at = (self.home / f"ended{rank}").read_text().split()
        return int(code), float(at)

    def printed(self, rank: int) -> str:
        path = self.home / f"printed{rank}"
        return path.read_text() if path.exists() else ""

    def error(self, rank: int) -> str:
        """The last error that the rank ended with."""
        found = re.findall(r"^(?:\[rank\d+\]: )?(tpcore\.errors\..*(?:\n.*)*)", self.printed(rank), re.MULTILINE)
        return found[-1] if found else ""


def _machine(
    network: Network | None,
    host: int,
    home: Path,
    ranks: range,
    env: dict[str, str],
    program: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    if network is not None:
        (home / f"hosts{host}").write_text(network.hosts_file())
        pid = network.enter(host, str(home / f"hosts{host}"))
        if pid:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    status = 1
    try:
        status = _ranks(home, ranks, env, program, args)
    finally:
        os._exit(status)


def _ranks(home: Path, ranks: range, env: dict[str, str], program: Callable[..., None], args: tuple[Any, ...]) -> int:
    alive = {}
    for local, rank in enumerate(ranks):
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            os.environ.update(env | {"RANK": str(rank), "LOCAL_RANK": str(local)})
            printed = home / f"printed{rank}"
            os._exit(forked.status(partial(program, *args), printed, printed))
        alive[pid] = rank
    while alive:
        pid, status = os.wait()
        if pid in alive:  # the first process of a host inherits orphans
            text = f"{os.waitstatus_to_exitcode(status)} {time.time()}"
            (home / f"ended{alive.pop(pid)}").write_text(text)
    return 0


def environment(world: int, check: str = "warmup", **more: str) -> dict[str, str]:
    """Of all ranks of a job whose first host is the first."""
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": address(0), "MASTER_PORT": str(PORT)}
    return {**common, "TPCORE_CHECK": check, "OMP_NUM_THREADS": "1", **more}
