"""Reductions of gradients that run beside backward: each starts when the gradients of its bucket are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock

import torch
from torch import Tensor

from ..comm.comm import Pending

GradientOf = Callable[[Tensor], Tensor | None]


class Bucket:
    """Gradients that one collective reduces. ``begin`` starts it with the present ones, and zeros for missing ones;
    ``put`` takes its result."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradient_of: GradientOf,
        begin: Callable[[], Pending],
        put: Callable[[Tensor], None],
    ) -> None:
        self.parameters, self._gradient_of, self._begin, self._put = parameters, gradient_of, begin, put

    def start(self) -> None:
        with torch.no_grad():
            self.wait = self._begin()
        # after the start, which makes sparse gradients dense
        self._sent = [(g, g._version if g is not None else 0) for g in map(self._gradient_of, self.parameters)]

    def changed(self) -> bool:
        """Whether a gradient is another one than at the start: accumulated, scaled, dropped, replaced."""
        now = map(self._gradient_of, self.parameters)
        return any(
            g is not sent or (g is not None and g._version != version)
            for g, (sent, version) in zip(now, self._sent, strict=True)
        )

    def finish(self, again: bool) -> None:
        """Wait, and put the result. ``again``: of the present gradients, since a rank's have changed. Collective."""
        total = self.wait()
        self._put(self._begin()() if again else total)


class Overlap:
    """The buckets of one optimizer that are under way, until its step takes them. They start in one order on all ranks.
    The step compares each gradient with what was sent, so that a start that was too early changes no number. A block
    learns from the last one how often backward accumulates a gradient: never for a parameter that is not used."""

    def __init__(self) -> None:
        self._due: dict[Tensor, int] = {}
        self._under_way: list[Bucket] = []

    @contextmanager
    def block(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Start ``buckets`` while backward runs in the block, the others at its end."""
        self.drop()
        waiting, arrivals, lock = [*reversed(buckets)], Counter[Tensor](), Lock()

        def arrive(p: Tensor) -> None:
            with lock:  # backward has a thread for each device
                arrivals[p] += 1
                while waiting and all(arrivals[q] >= self._due.get(q, 1 << 62) for q in waiting[-1].parameters):
                    self._start(waiting.pop())

        with ExitStack() as hooks:
            for p in {p: None for bucket in buckets for p in bucket.parameters}:
                hooks.callback(p.register_post_accumulate_grad_hook(arrive).remove)
            yield
        while waiting:
            self._start(waiting.pop())
        self._due = {p: arrivals[p] for bucket in buckets for p in bucket.parameters}

    def _start(self, bucket: Bucket) -> None:
        bucket.start()
        self._under_way.append(bucket)

    def take(self) -> list[Bucket]:
        """The buckets under way, which the caller waits for."""
        taken, self._under_way = self._under_way, []
        return taken

    def drop(self) -> None:
        """Wait for the buckets under way; use none."""
        for bucket in self.take():
            bucket.wait()


def overlap_of(optimizer: torch.optim.Optimizer) -> Overlap:
    """An attribute of ``optimizer``, which its state does not include."""
    found: Overlap = vars(optimizer).setdefault("tpcore_overlap", Overlap())
    return found
