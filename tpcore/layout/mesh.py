"""Meshes of ranks and their groups: pure data, no torch.distributed, testable without processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from ..errors import counted

BATCH = ("dp", "ep")
"""The axes whose ranks have other examples: data loaders, samplers and learning-rate schedules count these."""
DATA = (*BATCH, "cp")
"""The axes whose ranks have other examples or other tokens of them: gradients are a mean over these, a ZeRO
optimizer cuts its state over them, and a checkpoint stores one copy for all of them."""


@dataclass(frozen=True)
class Group:
    """One partition of the world, e.g. all tp groups. Identical on all ranks. ``partition`` is XLA's replica groups,
    the result of ``get_*_group(as_list=True)``, and the table of a c10d backend's subgroups. ``within``: the length of
    the runs into which groups over ``axes`` are divided; None: they are whole."""

    axes: tuple[str, ...]
    partition: tuple[tuple[int, ...], ...]
    within: int | None = None

    @property
    def size(self) -> int:
        return len(self.partition[0])

    @property
    def name(self) -> str:
        """Its name in programs, the same in every process, with the length of runs: ``pp.tp``, ``tp/2``."""
        return ".".join(self.axes) + ("" if self.within is None else f"/{self.within}")

    def members(self, rank: int) -> tuple[int, ...]:
        for ranks in self.partition:
            if rank in ranks:
                return ranks
        raise ValueError(f"rank {rank} is in no {self.axes} group of {self.partition}")

    def as_list(self) -> list[list[int]]:
        return [list(ranks) for ranks in self.partition]


@dataclass(frozen=True, eq=False)
class Mesh:
    """Named axes over ranks, outermost first: ``Mesh({"dp": 2, "tp": 4})``.

    tp is innermost by convention, so that its ranks are contiguous and its traffic stays on one host.
    """

    axes: Mapping[str, int]

    def __post_init__(self) -> None:
        bad = {name: size for name, size in self.axes.items() if size < 1}
        if bad or not self.axes:
            raise ValueError(f"a mesh needs axes of size 1 or more, not {dict(self.axes)}")
        object.__setattr__(self, "axes", MappingProxyType(dict(self.axes)))

    def __repr__(self) -> str:
        return f"Mesh({dict(self.axes)})"

    def __eq__(self, other: object) -> bool:
        # in order: dp x tp and tp x dp place the same rank differently
        return isinstance(other, Mesh) and list(self.axes.items()) == list(other.axes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.axes.items()))

    @cached_property
    def size(self) -> int:
        return math.prod(self.axes.values())

    def present(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of ``axes`` that this mesh has, ``mesh.present(DATA)`` for instance."""
        return tuple(axis for axis in axes if axis in self.axes)

    def group(self, *names: str, within: int | None = None) -> Group:
        """All groups of ranks that differ only in their coordinates on ``names``. ``within`` divides each into runs of
        that many members: ``within=2`` over tp for key heads that two neighbouring ranks both have."""
        unknown = sorted(set(names) - set(self.axes))
        if unknown:
            remedy = dict.fromkeys(unknown, 1) | dict(self.axes)
            raise ValueError(f"no mesh axis {unknown}; this mesh has {list(self.axes)}, and Mesh({remedy}) all of them")
        grid = np.arange(self.size).reshape(tuple(self.axes.values()))
        order = list(self.axes)
        other_dims = [order.index(n) for n in order if n not in names]
        group_dims = [order.index(n) for n in names]
        size = math.prod(self.axes[n] for n in names)
        if within is not None and (within < 1 or size % within):
            raise ValueError(f"within={within} does not divide a group of {size} ranks over {names}")
        rows = grid.transpose(other_dims + group_dims).reshape(-1, within or size)
        partition = tuple(tuple(int(r) for r in row) for row in rows)
        return Group(names, partition, None if within == size else within)

    def world(self) -> Group:
        return self.group(*self.axes)

    def rank(self, at: Mapping[str, int]) -> int:
        """The rank at these coordinates: ``rank(coords(r)) == r``."""
        index = 0
        for axis, size in self.axes.items():
            index = index * size + at[axis]
        return index

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinates of ``rank``. Host-side only: file names, logs, initial values."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a mesh of {counted(self.size, 'rank')} {dict(self.axes)}")
        index = np.unravel_index(rank, tuple(self.axes.values()))
        return dict(zip(self.axes, (int(i) for i in index), strict=True))
