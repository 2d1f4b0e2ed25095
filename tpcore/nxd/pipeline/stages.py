"""Groups of some pipeline stages: those that share a parameter, and neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...runtime.context import current


def _pipelines() -> list[list[int]]:
    """The ranks of every pipeline, in the order of stages."""
    mesh = current().mesh
    return mesh.group(*(["pp"] if "pp" in mesh.axes else [])).as_list()


def create_pg_with_ranks(ranks: Sequence[int]) -> Any:
    """This pipeline's group of the stages ``ranks`` as the backend's own object; None on a rank of another
    stage. Collective over the world; the second call for the same stages returns the same object."""
    ctx = current()
    shared = [tuple(stages[i] for i in ranks) for stages in _pipelines()]
    others = [
        tuple(rank for rank in stages if rank not in row) for stages, row in zip(_pipelines(), shared, strict=True)
    ]
    comm = ctx.grouped(f"stages {list(ranks)}", (*shared, *filter(None, others)))
    return comm.process_group if any(ctx.rank in row for row in shared) else None


def _neighbours(step: int, as_list: bool) -> Any:
    """The pairs of neighbouring stages, or this rank's one: ``step`` 0 with the next stage, 1 with the one
    before. The pairs that begin at even stages and those at odd ones are two partitions."""
    ctx, pipelines = current(), _pipelines()
    count = len(pipelines[0])
    if count % 2:
        raise ValueError(f"{count} pipeline stages make no pairs: there is no group of neighbours")
    pairs = [
        [[stages[i], stages[(i + 1) % count]] for stages in pipelines for i in range(first, count, 2)]
        for first in (0, 1)
    ]
    mine = (ctx.coord("pp") + step) % 2
    if as_list:
        return pairs[mine]
    # both on every rank, for making a group is collective over the world
    comms = [
        ctx.grouped(f"pairs from stage {first}", tuple(tuple(sorted(pair)) for pair in pairs[first]))
        for first in (0, 1)
    ]
    return comms[mine].process_group


def get_next_rank_group(as_list: bool = False) -> Any:
    """This stage and the next as the backend's own object; ``as_list``: all such pairs. The first call is
    collective over the world. ValueError for an odd number of stages."""
    return _neighbours(0, as_list)


def get_prev_rank_group(as_list: bool = False) -> Any:
    """This stage and the one before, like ``get_next_rank_group``."""
    return _neighbours(1, as_list)
