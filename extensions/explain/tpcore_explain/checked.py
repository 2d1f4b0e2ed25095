"""The observer of a checked run: what ranks should have alike is compared, and operations on parts are inspected."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpcore.comm.comm import Comm
from tpcore.comm.observer import Observer, plain
from tpcore.comm.signature import call_site
from tpcore.private import recorded
from tpcore.runtime.consensus import gather
from tpcore.runtime.digests import Note, digest, first_difference

from .parts import Mark, marked

_MOST = 10_000  # notes kept between two comparisons; evaluation never compares


class Checks(Observer):
    """The checks of one rank. ``report`` receives each problem and may raise; None: no part is marked."""

    def __init__(self, report: Callable[[str], None] | None) -> None:
        self._report = report
        self.notes: list[Note] = []

    def part(self, y: Tensor, comm: Comm, dim: int, kind: str) -> Tensor:
        if self._report is None or comm.size == 1 or torch.compiler.is_compiling():
            return y
        return marked(plain(y), Mark(kind, dim % y.ndim, y.shape[dim], comm.size, self._report))

    def same(self, name: str, t: Tensor, at: str = "") -> None:
        """Note a digest of ``t``. ``at``: where; by default the line outside of tpcore."""
        traced = torch.compiler.is_compiling() or recorded(t)
        if not t.is_meta and len(self.notes) < _MOST and not traced:
            code, line = call_site()
            where = at or f"at {code.co_filename}:{line} in {code.co_name}"
            self.notes.append((f"{name} {where}", digest(t)))

    def compare(self, comm: Comm) -> None:
        if comm.position.device.type == "meta":
            return  # a recorded step, whose notes are compared when other ranks are recorded too
        notes, self.notes = self.notes, []
        if comm.size == 1 or not comm.eager:
            return
        difference = difference_of(comm.transport.members, gather(notes, comm))
        if difference is not None and self._report is not None:
            self._report(difference)


class FirstCalls(Observer):
    """Of one layer, that somebody's plan leaves in parts: in its first calls what surely takes a part for the whole
    is raised as a ValueError."""

    left = 512

    def part(self, y: Tensor, comm: Comm, dim: int, kind: str) -> Tensor:
        if self.left <= 0 or comm.size == 1 or torch.compiler.is_compiling():
            return y
        self.left -= 1
        return marked(plain(y), Mark(kind, dim % y.ndim, y.shape[dim], comm.size, _raise, certain=True))


def difference_of(ranks: Sequence[int], notes_by_rank: Sequence[Sequence[Note]]) -> str | None:
    """A message about the first note in which ranks of one tp group differ; None if there is none."""
    different = first_difference(notes_by_rank)
    if different is None:
        return None
    other, name, other_name = different
    return (
        f"ranks {ranks[0]} and {ranks[other]} of one tp group differ in {name}"
        + (f" (rank {ranks[other]}: {other_name})" if name != other_name else "")
        + ". The ranks of a tp group need the same batch and the same seed: the sampler "
        "takes ctx.index(ctx.batch) of ctx.batch.size, and call tpcore.random.manual_seed alike on all"
    )


def raising() -> Checks:
    """Checks for a run: each problem is raised as a ValueError."""
    return Checks(_raise)


def _raise(problem: str) -> None:
    raise ValueError(problem)
