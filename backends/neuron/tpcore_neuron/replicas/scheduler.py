"""Ranks as threads, of which one runs Python at a time; they meet when XLA programs are run. As in
``tpcore.testing.threads`` a rank has the turn while it runs and passes it on only when it meets the others. The
process's global state (random state, environment, tpcore's context) is swapped with it. So each rank runs as in a
process of its own, and it is known which rank waits for which."""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tpcore import settings
from tpcore.errors import BackendError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from tpcore.processes.transfer import Outcome, outcome_of
from tpcore.runtime.context import swap_process

GRACE = 5.0  # seconds for ranks to unwind once one has failed


@dataclass(frozen=True)
class Arrival:
    """The point at which a rank waits. All ranks must come to the same point; the site may differ."""

    what: str
    site: str
    payload: Any

    def __str__(self) -> str:
        return f"waits at {self.what}, called at {self.site}"


Check = Callable[[Sequence[Arrival]], None]
"""Checks the arrivals of all ranks; its error is raised on every rank."""


class Scheduler:
    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self._turn, self._meetings = threading.Condition(), 0
        self._holder: int | None = None
        self._waiting, self._ended = dict[int, Arrival](), dict[int, Outcome]()
        self._met: list[Arrival] = []
        self._failure: BaseException | None = None
        self._threads: dict[int, threading.Thread] = {}

    def meet(self, rank: int, arrival: Arrival, check: Check = lambda arrivals: None) -> list[Any]:
        """Wait for every rank to come here; return the payloads of all, in rank order."""
        with self._turn:
            meeting = self._meetings
            self._waiting[rank] = arrival
            state = _GlobalState()
            self._holder = None
            if len(self._waiting) == self.size:
                self._complete(check)
            elif len(self._waiting) + len(self._ended) == self.size:
                self._fail(PeerLostError(f"a rank has finished and others wait for it:\n{self._report()}"))
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._meetings > meeting or self._failure is not None)
            met, passed = self._met, self._meetings > meeting
            self._turn.wait_for(lambda: self._holder is None)
            self._holder = rank
            state.restore()
            if self._failure is not None and not passed:
                error = self._failure  # a copy: one object would collect the tracebacks of all threads
                raise type(error)(*error.args) if isinstance(error, BackendError) else RuntimeError(str(error))
            return [a.payload for a in met]

    def _complete(self, check: Check) -> None:
        arrivals = [self._waiting[r] for r in range(self.size)]
        other = [r for r in range(self.size) if arrivals[r].what != arrivals[0].what]
        try:
            if other:
                raise CollectiveMismatchError(
                    f"ranks 0 and {other[0]} do not come to the same point of the program:\n{self._report()}"
                )
            check(arrivals)
        except Exception as e:  # noqa: BLE001  raised on every rank
            self._fail(e)
            return
        self._met = arrivals
        self._meetings += 1
        self._waiting.clear()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._turn.notify_all()

    def _report(self) -> str:
        return "\n".join(f"  rank {r} {self._state(r)}" for r in range(self.size))

    def _state(self, rank: int) -> str:
        if rank in self._waiting:
            return str(self._waiting[rank])
        if rank in self._ended:
            error = self._ended[rank].error
            return "has finished" if error is None else f"failed with {type(error).__name__}: {error}"
        frame = sys._current_frames().get(self._threads[rank].ident or 0)
        lines = traceback.extract_stack(frame)[-3:] if frame else []
        where = " < ".join(f"{f.filename}:{f.lineno} in {f.name}" for f in reversed(lines))
        return f"runs at {where}" if self._holder == rank else f"waits for its turn at {where}"

    def run(self, fn: Callable[[int], Any], envs: Sequence[dict[str, str]]) -> list[Outcome]:
        """Call ``fn(rank)`` on every rank; return each outcome. A rank that never ends has an error."""
        for rank in range(self.size):
            target, args = copy_context().run, (self._one, rank, fn, envs[rank])
            self._threads[rank] = threading.Thread(target=target, args=args, name=f"rank {rank}", daemon=True)
        caller = _GlobalState()
        for thread in self._threads.values():
            thread.start()
        with self._turn:
            while len(self._ended) < self.size and self._failure is None:
                before = self._meetings, len(self._ended)
                if not self._turn.wait_for(partial(self._moved, before), self.timeout):
                    text = f"no rank has moved on for {self.timeout:g} s:\n{self._report()}"
                    self._fail(CollectiveTimeoutError(text))
            self._turn.wait_for(lambda: len(self._ended) == self.size, GRACE)
            caller.restore()
            left = CollectiveTimeoutError(str(self._failure or "")) if self._failure else None
            return [self._ended.get(r, Outcome(error=left)) for r in range(self.size)]

    @property
    def broken(self) -> bool:
        """Whether a rank is still running: a thread cannot be stopped."""
        return len(self._ended) < self.size

    def _moved(self, before: tuple[int, int]) -> bool:
        return (self._meetings, len(self._ended)) != before or self._failure is not None

    def _one(self, rank: int, fn: Callable[[int], Any], env: dict[str, str]) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._holder is None)
            self._holder = rank
            torch.manual_seed(0)  # unlike the start of a real process this is reproducible
            random.seed(0)
            np.random.seed(0)
            settings.update(env)
            swap_process([])
        outcome = outcome_of(lambda: fn(rank))
        with self._turn:
            self._ended[rank] = outcome
            self._holder = None
            error = outcome.error
            if error is not None:
                self._fail(PeerLostError(f"rank {rank} failed with {type(error).__name__}: {error}"))
            elif self._waiting and len(self._waiting) + len(self._ended) == self.size:
                self._fail(PeerLostError(f"a rank has finished and others wait for it:\n{self._report()}"))
            self._turn.notify_all()


class _GlobalState:
    """A snapshot of the process's global state, which belongs to the running rank."""

    def __init__(self) -> None:
        self._torch, self._random = torch.get_rng_state(), random.getstate()
        self._numpy = np.random.get_state()
        self._env, self._contexts = settings.environment(), swap_process([])

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        settings.restore(self._env)
        swap_process(self._contexts)
