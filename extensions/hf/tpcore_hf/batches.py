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
    have for one step; at the end fewer. As many for each rank."""

    def __init__(self, batches: Any, ranks: int, length: int) -> None:
        self.batches, self.ranks, self.length = batches, ranks, length

    def __getattr__(self, name: str) -> Any:
        """What ``batches`` has, and only that, for those who look for ``sampler`` or ``set_epoch``."""
        if name == "batches":  # asked of a copy before it has anything
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.batches)
        while step := list(islice(batches, self.ranks * self.length)):
            run = len(step) // self.ranks
            yield from (step[rank * run + i] for i in range(run) for rank in range(self.ranks))


def in_runs(loader: Any, length: int) -> Any:
    """In a ``reproducible`` job, ``loader`` with each dp rank's ``length`` batches of a step in a row, so that their
    gradients are added in the tree of one rank. ValueError for a prepared loader whose batches are others than those of
    one rank: pieces of batches, of data without a length, or filled up at the end."""
    ctx = current()
    ranks, dealt = ctx.batch.size, getattr(loader, "batch_sampler", None)
    if ctx.reproducible is None or ranks == 1:
        return loader
    sampler: Any = getattr(getattr(dealt, "batch_sampler", None), "sampler", None)
    if not isinstance(dealt, BatchSamplerShard) or dealt.split_batches or not hasattr(sampler, "__len__"):
        raise ValueError(
            f"reproducible={ctx.reproducible}: {ranks} dp ranks would have other batches than one: take a dataset with "
            "a length, without split_batches and samplers of batches"
        )
    examples, size = len(sampler), int(dealt.batch_size)
    if left := examples % (size * ranks):
        raise ValueError(
            f"reproducible={ctx.reproducible}: {examples} examples are no whole number of batches of {size} for "
            f"{ranks} dp ranks, for which accelerate fills up or drops the last: take {examples - left}"
        )
    if length > 1:
        dealt.batch_sampler = Runs(dealt.batch_sampler, ranks, length)
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
