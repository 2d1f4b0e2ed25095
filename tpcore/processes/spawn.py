"""Starting the processes of a job on this host and ending them: each a fresh interpreter on one module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..settings import inherited, of_rank
from .lifeline import Lifeline

_POLL = 0.02  # seconds between two looks at processes that run


class Processes:
    """Started one by one with ``start``; they end with this process. ``close`` ends those that are left."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []
        self._lifeline = Lifeline()

    def start(
        self,
        module: str,
        arguments: Sequence[object] = (),
        *,
        environment: Mapping[str, str],
        fds: Sequence[int] = (),
        log: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """``python -m module LIFELINE arguments``, with ``fds`` open. The module's first act is
        ``lifeline.follow(LIFELINE)``. ``log``: a file for its output, which else is this process's."""
        out = None if log is None else log.open("wb")
        try:
            process = subprocess.Popen(
                [*_command(module), str(self._lifeline.fd), *map(str, arguments)],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=None if out is None else subprocess.STDOUT,
                pass_fds=(self._lifeline.fd, *fds),
                start_new_session=True,  # Ctrl-C in a terminal is for the owner to deal with
            )
        finally:
            if out is not None:
                out.close()
        self.all.append(process)
        return process

    def join(self, grace: float, patience: float) -> list[int | None]:
        """Wait for all; once one has failed, ``grace`` seconds for the others to fail by themselves, then end
        them. The exit codes, None for a process that was ended."""
        while all(p.poll() in (None, 0) for p in self.all):
            if all(p.poll() == 0 for p in self.all):
                return [0] * len(self.all)
            time.sleep(_POLL)
        self._wait(grace)
        codes = [p.poll() for p in self.all]
        self.send(signal.SIGTERM)
        self._wait(patience)  # for what they do on SIGTERM; one that is stopped does nothing
        return codes

    def send(self, number: int) -> None:
        for process in self.all:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def close(self, patience: float = 0.0) -> None:
        """Wait ``patience`` seconds for all to end, kill the others, and wait for that."""
        self._wait(patience)
        for process in self.all:
            process.kill()
            process.wait()
        self._lifeline.close()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.all:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def rank_environment(rank: int, size: int, job: Mapping[str, str]) -> dict[str, str]:
    """For rank ``rank`` of ``size`` on this host. ``job``: by which variables the ranks find each other."""
    return inherited() | of_rank(rank, size) | dict(job)


def _command(module: str) -> list[str]:
    """``python -m module`` that finds modules where this process does, from the first import on. With ``-m``
    alone the directory at hand comes first, whatever lies there."""
    path = [p or os.getcwd() for p in sys.path]
    run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {run}"]
