"""How fast the host is now: a shared one changes by the minute."""

from __future__ import annotations

import statistics
import time

import torch


class Probe:
    """Work that is the same in every process, half of it bound by the processor and half by memory."""

    def __init__(self) -> None:
        self._x, self._long, self.seconds = torch.randn(384, 384), torch.zeros(3 << 20), list[float]()

    def run(self, times: int = 1) -> None:
        for _ in range(times):
            start = time.perf_counter()
            for _ in range(4):
                self._x @ self._x
                self._long.add_(1)
            self.seconds.append(time.perf_counter() - start)


def probed(steps: int) -> float:
    """In a process of its own: the median time of the probe, the worse process's."""
    torch.set_num_threads(1)
    probe = Probe()
    probe.run(10 * steps)
    return statistics.median(probe.seconds[steps:])
