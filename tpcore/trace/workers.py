"""The processes that a traced model runs in, one per rank, as their owner sees them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from torch import Tensor

from .._remote import Outcome, death, root_cause, unpack_outcome
from ..backend import backend_class
from ..errors import BackendError, PeerLostError
from .artifact import Manifest
from .inputs import Plan
from .messages import answered, request, send, value_of
from .shared import SharedBuffer

START = 120.0
"""Seconds that starting may take."""
_GRACE = 1.0  # seconds for the other ranks to answer once one has failed
_LOG = 2000  # characters of a log that are shown
# what a launcher of this process may have set, and would be taken for the workers' own
_FOREIGN = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")


class Workers:
    """``start``, then ``ask`` and ``call``, one at a time; ``close``. After a failure all say what it was."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest, self.weights = folder, manifest, folder
        self.running = False
        self.seconds: list[float] = []
        self._failure: tuple[type[Exception], str] | None = None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    # -- from start to end --------------------------------------------------------------------------------
    def start(self) -> None:
        """Returns when all ranks are ready. Raises what keeps one from it."""
        self._failure, self._pid = None, os.getpid()
        self._home = TemporaryDirectory(prefix="tpcore-serve-")
        self._inputs, self._outputs = SharedBuffer(), SharedBuffer()
        self._lifeline = os.pipe()
        self._poll = select.poll()
        self._sockets: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._owed: set[int] = set()
        # most calls are like the one before; each in one assignment, which no interrupt cuts in two
        self._asking: tuple[Plan | None, bytes, list[Tensor]] = None, b"", []
        self._answered: tuple[bytes, list[Tensor]] = b"", []
        self.running = True
        try:
            job = backend_class(self._manifest.backend).job(Path(self._home.name))
            for rank in range(self._manifest.tp):
                self._spawn(rank, job)
            self._owed.update(range(self._manifest.tp))
            self._answers("start", START)
        except BaseException:
            self.close()
            raise

    def _spawn(self, rank: int, job: dict[str, str]) -> None:
        mine, theirs = socket.socketpair()
        self._sockets.append(mine.detach())
        self._poll.register(self._sockets[rank], select.POLLIN)
        fds = (theirs.fileno(), self._inputs.fd, self._outputs.fd, self._lifeline[0])
        command = [sys.executable, "-m", "tpcore.trace.worker", str(self._folder), str(self.weights)]
        with theirs, self._log(rank).open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [*command, *map(str, fds)],
                    env=self._environment(rank) | job,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=fds,
                    start_new_session=True,  # Ctrl-C in a terminal is for the owner to deal with
                )
            )

    def _environment(self, rank: int) -> dict[str, str]:
        n = self._manifest.tp
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        threads = str(max(1, len(os.sched_getaffinity(0)) // n))
        path = os.pathsep.join(p for p in sys.path if p)
        return {"OMP_NUM_THREADS": threads, **kept, "PYTHONPATH": path} | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
        }

    def _log(self, rank: int) -> Path:
        return Path(self._home.name) / f"rank{rank}.log"

    def close(self) -> None:
        """End the processes and wait for that. Twice is once."""
        if not self.running or os.getpid() != self._pid:  # a fork has no children of its parent's
            return
        self.running = False
        for fd in self._sockets:
            os.close(fd)
        idle = self._failure is None and not self._owed
        deadline = time.monotonic() + (5.0 if idle else 0.0)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        for fd in self._lifeline:
            os.close(fd)
        self._inputs.close()
        self._outputs.close()
        self._home.cleanup()

    # -- messages -----------------------------------------------------------------------------------------
    def call(self, plan: Plan, inputs: Sequence[Tensor], timeout: float | None) -> list[Tensor]:
        """Outputs of the first rank, in memory of their own. ``inputs``: of the same layout for each plan."""
        if self._owed or self._failure is not None or os.getpid() != self._pid:
            self._settle(timeout)
        if plan is not self._asking[0]:
            places = self._inputs.place(inputs)
            message = request("call", program=plan.program, inputs=places)
            self._asking = plan, message, self._inputs.get(places)
        _, message, views = self._asking
        for view, t in zip(views, inputs, strict=True):
            view.copy_(t)
        answers = self._ask(message, timeout)
        self.seconds = [seconds for _, seconds in answers]
        answer = answers[0][0]
        if answer != self._answered[0]:
            self._answered = answer, self._outputs.get(value_of(answer))
        return [t.clone() for t in self._answered[1]]

    def ask(self, message: bytes, timeout: float | None) -> list[Any]:
        """What each rank answers to a request. Raises the error of a rank that failed."""
        self._settle(timeout)
        return [value_of(data) for data, _ in self._ask(message, timeout)]

    def _ask(self, message: bytes, timeout: float | None) -> list[tuple[bytes, float]]:
        try:
            for rank, fd in enumerate(self._sockets):
                self._owed.add(rank)
                send(fd, message)
        except OSError:
            pass  # the rank has ended: its end of the socket says so below
        except BaseException as e:  # an interrupt between two ranks, of which one would wait for the other
            with suppress(BackendError):
                self._fail(BackendError, "traced model: interrupted while its ranks were being asked", e)
            raise
        return self._answers("call", timeout)

    def _settle(self, timeout: float | None) -> None:
        """Wait for the answers to a message whose sender was interrupted."""
        if os.getpid() != self._pid:  # both would read the answers, each some of the other's
            raise RuntimeError(
                f"this traced model belongs to process {self._pid}, of which this one is a fork: "
                "load it here again"
            )
        if self._owed and self._failure is None:
            with suppress(Exception):
                self._answers("call", timeout)
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)

    def _answers(self, doing: str, timeout: float | None) -> list[tuple[bytes, float]]:
        """What every rank that owes an answer said, and its seconds."""
        waiting, sockets = self._owed, self._sockets
        deadline = None if timeout is None else time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        values = [(b"", 0.0)] * len(sockets)
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
            ready = self._poll.poll(left)
            if not ready:
                self._give_up(doing, waiting, outcomes, timeout)
            for fd, _ in ready:
                rank = sockets.index(fd)
                try:
                    well, data, seconds = answered(fd)
                except (EOFError, OSError):
                    self._lost(rank, outcomes)
                waiting.discard(rank)
                if well:
                    values[rank] = data, seconds
                else:
                    outcomes[rank] = unpack_outcome(data)
                    soon = time.monotonic() + _GRACE
                    deadline = soon if deadline is None else min(deadline, soon)
        error = root_cause(list(outcomes.values())) if outcomes else None
        if error is None:
            return values
        if isinstance(error, BackendError) or len(outcomes) < len(sockets):
            self._fail(type(error) if isinstance(error, BackendError) else BackendError, str(error), error)
        raise error

    # -- failures -----------------------------------------------------------------------------------------
    def _lost(self, rank: int, outcomes: dict[int, Outcome]) -> NoReturn:
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        code = process.poll()
        if code is None:
            process.kill()
            code = process.wait()
        error = root_cause(list(outcomes.values()))
        said = self._log(rank).read_text(errors="replace")[-_LOG:].strip()
        log = f"; the end of its log:\n{said}" if said else "; its log is empty"
        self._fail(PeerLostError, f"traced model: {death(rank, code)}{log}", error)

    def _give_up(
        self, doing: str, waiting: set[int], outcomes: dict[int, Outcome], timeout: float | None
    ) -> NoReturn:
        error = root_cause(list(outcomes.values()))
        late = ", ".join(map(str, sorted(waiting)))
        if error is not None:
            text = f"{error}\n(rank {late} did not come to an end after this, and all were ended)"
            self._fail(type(error) if isinstance(error, BackendError) else BackendError, text, error)
        self._fail(
            TimeoutError,
            f"traced model: rank {late} did not answer within the timeout of {timeout:g} s ({doing}); "
            "all ranks were ended",
            None,
        )

    def _fail(self, kind: type[Exception], text: str, cause: BaseException | None) -> NoReturn:
        self._failure = kind, f"{text}\nThe model can be used no more: load it again, or with restart=True"
        with suppress(ProcessLookupError):
            for process in self._processes:
                process.send_signal(signal.SIGKILL)
        self.close()
        raise kind(self._failure[1]) from cause
