"""Starts and ends the processes of a job on this host. Each is a fresh interpreter that runs one module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from ..settings import HUGE_PAGES, THREADS, inherited, of_rank

_POLL = 0.02  # seconds between polls of running processes


class Processes:
    """Processes started with ``start``. Those still running end at ``close``, or with this process."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []
        # a child inherits neither, unless pass_fds names it; nobody writes, so a read ends when this process does
        self._lifeline, self._owned = os.pipe()

    def start(
        self,
        module: str,
        arguments: Sequence[object] = (),
        *,
        environment: Mapping[str, str],
        fds: Sequence[int] = (),
        log: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start ``python -m module LIFELINE arguments`` with ``fds`` open, which first calls ``follow(LIFELINE)``.
        ``log``: a file for its output; None for this process's output."""
        out = None if log is None else log.open("wb")
        try:
            process = subprocess.Popen(
                [*_command(module), str(self._lifeline), *map(str, arguments)],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=None if out is None else subprocess.STDOUT,
                pass_fds=(self._lifeline, *fds),
                start_new_session=True,  # Ctrl-C in a terminal reaches the owner only
            )
        finally:
            if out is not None:
                out.close()
        self.all.append(process)
        return process

    def join(self, grace: float, patience: float) -> list[int | None]:
        """Wait for all processes. After one failed, the others get ``grace`` seconds to fail by themselves
        and are then ended. Returns the exit codes, None for a process that was ended."""
        while all(p.poll() in (None, 0) for p in self.all):
            if all(p.poll() == 0 for p in self.all):
                return [0] * len(self.all)
            time.sleep(_POLL)
        self._wait(grace)
        codes = [p.poll() for p in self.all]
        self.send(signal.SIGTERM)
        self._wait(patience)  # for their SIGTERM handlers; a stopped process runs none
        return codes

    def send(self, number: int) -> None:
        for process in self.all:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def close(self, patience: float = 0.0) -> None:
        """Wait ``patience`` seconds for all to end. Kill the others and wait for their end."""
        self._wait(patience)
        for process in self.all:
            process.kill()
            process.wait()
        os.close(self._owned)
        os.close(self._lifeline)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.all:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def rank_environment(rank: int, size: int, job: Mapping[str, str]) -> dict[str, str]:
    """The environment of rank ``rank`` of ``size`` on this host. ``job``: variables for the rendezvous."""
    return inherited() | of_rank(rank, size) | dict(job)


def serving_environment(rank: int, size: int, job: Mapping[str, str]) -> dict[str, str]:
    """``rank_environment``; by default the host's cores are divided among the ranks, and tensors are in huge pages."""
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    return {THREADS.name: str(threads), HUGE_PAGES.name: "1"} | rank_environment(rank, size, job)


def _command(module: str) -> list[str]:
    """``python -m module`` with this process's ``sys.path``, which a file in the working directory cannot shadow."""
    path = [p or os.getcwd() for p in sys.path]
    run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {run}"]


def follow(fd: int) -> None:
    """End this process when the owner of the lifeline ends, for whatever reason."""

    def end() -> None:
        os.read(fd, 1)
        os._exit(1)

    Thread(target=end, name="tpcore lifeline", daemon=True).start()
