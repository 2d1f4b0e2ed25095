"""The owner's side of a traced model's processes, one per rank, and the messages between them."""

from __future__ import annotations

import math
import os
import pickle
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from ...backend.registry import backend_class
from ...checkpoint.storage.publish import OwnedDirectory
from ...errors import BackendError, PeerLostError
from ...log import inform_of_start
from ...processes.launch import Processes, serving_environment
from ...processes.transfer import Outcome, SharedBuffer, death, root_cause, unpack_outcome
from ..artifact import TraceManifest

Reply = tuple[bool, Any]
"""True and a result, or False and an outcome packed."""

_START = 120.0  # seconds that starting may take
_GRACE = 1.0  # seconds for the other ranks to answer after the first failure
_LOG = 2000  # characters of a log that are shown


class Workers:
    """Call ``start``, then ``ask`` and ``call``, one at a time, then ``close``. A failure is raised again by
    every later call."""

    def __init__(self, folder: Path, manifest: TraceManifest) -> None:
        self._folder, self._manifest, self.weights = folder, manifest, folder
        self.running = False
        self.seconds: list[float] = []
        self._failure: tuple[type[Exception], str] | None = None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def start(self) -> None:
        """Start the processes and wait until all ranks are ready. Raises a rank's error."""
        self._failure, self._pid = None, os.getpid()
        self._home = OwnedDirectory("tpcore-serve-")
        self._logs = [Path(self._home.name) / f"rank{rank}.log" for rank in range(self._manifest.tp)]
        self._inputs, self._outputs = SharedBuffer(), SharedBuffer()
        self._poll = select.poll()
        self._requests: list[Connection] = []  # to each rank
        self._replies: list[Connection] = []  # and from it
        self._processes = Processes()
        self._pending: set[int] = set()
        self.running = True
        inform_of_start(self._manifest.tp)
        try:
            job = backend_class(self._manifest.backend).job(Path(self._home.name))
            for rank in range(self._manifest.tp):
                self._spawn(rank, job)
            self._pending.update(range(self._manifest.tp))
            self._answers("start", _START)
        except BaseException:
            self.close()
            raise

    def _spawn(self, rank: int, job: dict[str, str]) -> None:
        (requests, to_rank), (from_rank, replies) = Pipe(duplex=False), Pipe(duplex=False)
        self._requests.append(to_rank)
        self._replies.append(from_rank)
        self._poll.register(from_rank, select.POLLIN)
        fds = requests.fileno(), replies.fileno(), self._inputs.fd, self._outputs.fd
        arguments, environment = (self._folder, self.weights, *fds), serving_environment(rank, self._manifest.tp, job)
        environment["TMPDIR"] = self._home.name  # what libraries leave there goes with it, however the process ends
        with requests, replies:
            self._processes.start(
                "tpcore.trace.serve.worker", arguments, environment=environment, fds=fds, log=self._logs[rank]
            )

    def close(self) -> None:
        """End the processes and wait for their end. A second call does nothing."""
        if not self.running or os.getpid() != self._pid:  # the processes are not children of a fork
            return
        self.running = False
        for connection in (*self._requests, *self._replies):
            connection.close()
        idle = self._failure is None and not self._pending
        self._processes.close(5.0 if idle else 0.0)
        self._inputs.close()
        self._outputs.close()
        self._home.cleanup()

    def call(self, program: int, inputs: Sequence[Tensor], timeout: float | None) -> list[Tensor]:
        """Run the model. Returns the first rank's outputs, which the caller may keep."""
        self._settle(timeout)
        self._send_all(pickle.dumps(("call", (program, self._inputs.put(inputs)))))
        os.sched_yield()  # a rank that waits for this core starts 0.05 ms earlier
        answers = self._answers("call", timeout)
        self.seconds = [seconds for _, seconds in answers]
        return [t.clone() for t in self._outputs.get(answers[0][0])]

    def ask(self, do: str, *arguments: str) -> list[Any]:
        """Send a request to all ranks and return their answers. Raises a rank's error."""
        self._settle(None)
        self._send_all(pickle.dumps((do, arguments)))
        return self._answers("call", None)

    def _send_all(self, message: bytes) -> None:
        try:
            for rank, connection in enumerate(self._requests):
                self._pending.add(rank)
                connection.send_bytes(message)
        except OSError:
            pass  # the rank has ended: reading its answers detects that
        except BaseException as e:  # an interrupt between two ranks: one would wait for the other forever
            with suppress(BackendError):
                self._fail(BackendError, "traced model: interrupted while its ranks were being asked", e)
            raise

    def _settle(self, timeout: float | None) -> None:
        """Wait for pending answers of an interrupted call. Raises the error of an earlier failure."""
        if os.getpid() != self._pid:  # parent and fork would each read some of the other's answers
            raise RuntimeError(
                f"this traced model belongs to process {self._pid}, of which this one is a fork: load it here again"
            )
        if self._pending and self._failure is None:
            with suppress(Exception):
                self._answers("call", timeout)
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)

    def _answers(self, doing: str, timeout: float | None) -> list[Any]:
        """The answers of all pending ranks. Raises the root cause of their errors."""
        waiting, replies = self._pending, self._replies
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        values: list[Any] = [None] * len(replies)
        while waiting:
            left = max(0.0, deadline - time.monotonic()) * 1e3
            ready = self._poll.poll(None if left == math.inf else left)
            if not ready:
                self._give_up(doing, waiting, outcomes, timeout)
            for fd, _ in ready:
                rank = next(rank for rank, reply in enumerate(replies) if reply.fileno() == fd)
                try:
                    well, value = pickle.loads(replies[rank].recv_bytes())
                except (EOFError, OSError):
                    self._lost(rank, outcomes)
                waiting.discard(rank)
                if well:
                    values[rank] = value
                else:
                    outcomes[rank] = unpack_outcome(value)
                    deadline = min(deadline, time.monotonic() + _GRACE)
        error = root_cause(list(outcomes.values())) if outcomes else None
        if error is None:
            return values
        if isinstance(error, BackendError) or len(outcomes) < len(replies):
            self._fail(type(error) if isinstance(error, BackendError) else BackendError, str(error), error)
        raise error

    def _lost(self, rank: int, outcomes: dict[int, Outcome]) -> NoReturn:
        process = self._processes.all[rank]
        try:
            code = process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        error = root_cause(list(outcomes.values()))
        tail = self._logs[rank].read_text(errors="replace")[-_LOG:].strip()
        log = f"; the end of its log:\n{tail}" if tail else "; its log is empty"
        self._fail(PeerLostError, f"traced model: {death(rank, code)}{log}", error)

    def _give_up(self, doing: str, waiting: set[int], outcomes: dict[int, Outcome], timeout: float | None) -> NoReturn:
        error = root_cause(list(outcomes.values()))
        late = ", ".join(map(str, sorted(waiting)))
        if error is not None:
            text = f"{error}\n(rank {late} did not finish after this, and all ranks were ended)"
            self._fail(type(error) if isinstance(error, BackendError) else BackendError, text, error)
        text = f"traced model: rank {late} did not answer within the timeout of {timeout:g} s ({doing})"
        self._fail(TimeoutError, f"{text}; all ranks were ended", None)

    def _fail(self, kind: type[Exception], text: str, cause: BaseException | None) -> NoReturn:
        self._failure = kind, f"{text}\nThe model cannot be used any more: load it again, or pass restart=True"
        self._processes.send(signal.SIGKILL)
        self.close()
        raise kind(self._failure[1]) from cause
