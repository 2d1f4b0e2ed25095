"""Which batches of a step a data-parallel rank has: accelerate deals them in turn, a ``reproducible`` job in runs, in
which one tree of sums has the batches of each rank as a branch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler

from tpcore.errors import extra
from tpcore.runtime.context import current

with extra("trainer", __name__):
    from accelerate.data_loader import BatchSamplerShard


class Runs(BatchSampler):
    """Batches in another order, in which ranks that take them in turn have ``length`` in a row each, of all that they
    have for one step. What is left at the end, and is not so many for each, is taken in turn."""

    def __init__(self, batches: Any, ranks: int, length: int) -> None:
        self.sampler, self.batch_size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last
        self.batches, self.ranks, self.length = batches, ranks, length

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.batches)
        while step := list(islice(batches, self.ranks * self.length)):
            run = len(step) // self.ranks
            yield from (step[rank * run + i] for i in range(run) for rank in range(self.ranks))
            yield from step[self.ranks * run :]


def in_runs(loader: Any, length: int) -> Any:
    """In a ``reproducible`` job, ``loader`` with each dp rank's ``length`` batches of a step in a row, so that their
    gradients are added in the tree of one rank. ValueError for a prepared loader that is not dealt by its batches."""
    ctx = current()
    if ctx.reproducible is None or min(length, ctx.batch.size) == 1:
        return loader
    dealt = getattr(loader, "batch_sampler", None)
    if not isinstance(dealt, BatchSamplerShard):
        raise ValueError(
            f"reproducible={ctx.reproducible}: {length} batches a step of data without a length are dealt to "
            f"{ctx.batch.size} dp ranks in turn, and gradients are added in runs: take gradient_accumulation_steps=1"
        )
    dealt.batch_sampler = Runs(dealt.batch_sampler, ctx.batch.size, length)
    return loader


def check_in_turn(length: int) -> None:
    """ValueError in a ``reproducible`` job, for steps of ``length`` batches that accelerate deals by itself."""
    ctx = current()
    if ctx.reproducible is not None and min(length, ctx.batch.size) > 1:
        raise ValueError(
            f"reproducible={ctx.reproducible}: accelerate deals batches to {ctx.batch.size} dp ranks in turn, and "
            f"gradients of gradient_accumulation_steps={length} are added in runs: take 1 here, or "
            "tpcore_hf.trainer.Trainer, which deals runs"
        )
