"""A job that its scheduler ends: all ranks learn of the signal at one step, save, and leave with a status to match."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch

from ..runtime.context import current
from ..runtime.init import shutdown


class Preemption:
    """Notes the signal by which a scheduler announces the end of a job, while the block runs.

    Signals reach ranks between different steps, or some ranks alone. ``requested`` tells all ranks at one step:

        with tpcore.Preemption() as preemption:
            for step in range(first, last):
                train(step)
                if preemption.requested():
                    tpcore.checkpoint.save(state, f"run/{step + 1}")
                    preemption.leave()

    Args:
        signals: which to note: SIGTERM by default, of ``torchrun``, Slurm and Kubernetes alike.
        every: ``requested`` asks the other ranks at each ``every``-th call.
        told: says whether this rank was told, where that is no signal: in Ray's workers, which train in a thread,
            ``lambda: ray.train.get_preemption_info() is not None``. No signal is noted then, but those of ``signals``.

    Raises:
        ValueError: outside the main thread of a process, where Python sets no handlers; ``every`` below 1.
    """

    def __init__(self, *signals: int, every: int = 1, told: Callable[[], bool] | None = None) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: a number of calls, 1 or more")
        self.signals = signals or ((signal.SIGTERM,) if told is None else ())
        self.every = every
        self.told = told
        self.number = 0
        """Of the signal that some rank received, once ``requested`` has said so; 0 before."""
        self._here = 0
        self._calls = 0
        self._replaced: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        if self.signals and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"tpcore.Preemption in the thread {threading.current_thread().name!r}: Python sets handlers of signals "
                "in the main thread alone; start ranks as processes, with tpcore.launch or torchrun, or say told="
            )
        for number in self.signals:
            self._replaced[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside Python
        self._replaced.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._here = number

    def requested(self) -> bool:
        """Whether a rank has received a signal: the same answer on all ranks. Collective over the world, an
        all-reduce of one number."""
        self._calls += 1
        if not self.number and self._calls % self.every == 0:
            ctx = current()
            if self.told is not None and self.told():
                self._here = signal.SIGTERM
            here = torch.tensor([self._here], dtype=torch.int32, device="cpu").to(ctx.device)
            self.number = int(ctx.world.all_reduce(here, "max"))
        return self.number > 0

    def leave(self) -> NoReturn:
        """End this process when its saves in the background are done, with status 128 + the signal's number: 143
        after SIGTERM, which Kubernetes' jobs count as a failure that may be tried again."""
        shutdown()
        raise SystemExit(128 + self.number)
