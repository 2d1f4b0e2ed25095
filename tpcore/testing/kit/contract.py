"""The tests of the conformance kit, for pytest and for ``tpcore verify``, which needs no pytest."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from unittest import SkipTest

import torch

from ...backend.interface import Backend
from ...backend.registry import backend_class, unfit
from ...comm.transport import PRIMITIVES
from ...layout.mesh import Mesh
from .. import matrix
from . import collectives as bodies
from . import edges, lost, memory, programs, stages
from . import mappings as law
from .launched import launched_world

Run = Callable[..., list[list[str]]]
"""``run(mesh, fn, *args)`` calls ``fn(ctx, *args)`` on every rank and returns the ranks' messages."""


def meshes(world: int) -> list[Mesh]:
    """All meshes of ``world`` ranks with two or three axes of which at least two have two or more ranks."""
    out = []
    for pp in (n for n in range(1, world + 1) if world % n == 0):
        for dp in (n for n in range(1, world // pp + 1) if (world // pp) % n == 0):
            sizes = {"pp": pp, "dp": dp, "tp": world // pp // dp}
            if sum(n > 1 for n in sizes.values()) > 1:
                out.append(Mesh(sizes))
                if pp == 1:
                    out.append(Mesh({"dp": dp, "tp": world // dp}))
    return out


class Contract:
    """The tests, from simple to composed, and the values of their arguments. ``worlds``: the numbers of ranks to
    test; default: the launcher's number."""

    backend: ClassVar[str]
    worlds: ClassVar[tuple[int, ...]] = ()
    starts: ClassVar[bool] = True
    """Whether RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment make a process a rank: the kit
    then loses ranks of jobs of its own. False for a library whose launcher alone can start ranks."""
    patience: ClassVar[float] = 25.0
    """Seconds in which the ranks of such a job start."""
    every: ClassVar[int] = 7
    """Run every 7th case of each layer: 7 divides the length of no axis, so all values occur."""
    large: ClassVar[Sequence[int]] = edges.LARGE
    """Numbers of elements of large tensors."""
    most: ClassVar[int] = edges.MOST
    """Number of elements up to which every size is tried that is near a power of two."""
    calls: ClassVar[int] = 1100
    """Number of small calls of each method in a row. 70,000 are more than 16 bits count."""
    loses: ClassVar[Sequence[str]] = ()
    """Properties of odd numbers that the backend's library loses: "the sign of zero", "NaN in a maximum",
    "denormal numbers" of sums."""

    def backend_class(self) -> type[Backend]:
        return backend_class(type(self).backend)

    def choices(self) -> dict[str, list[Any]]:
        """The values of each test argument."""
        can = self.backend_class().capabilities
        worlds = type(self).worlds or (launched_world(),)
        return {
            "first": [Mesh({"dp": 1, "tp": worlds[0]})],
            "line": [Mesh({"dp": 1, "tp": n}) for n in worlds],
            "grid": [m for n in worlds for m in meshes(n)],
            "square": [Mesh({"dp": n // t, "tp": t}) for n in worlds for t in {n, n // 2} if t and n % t == 0],
            "staged": [m for n in worlds if (m := stages.stages_mesh(Mesh({"dp": 1, "tp": n}))) is not None],
            "dtype": list(can.dtypes),
            "moved": list(can.moved),
            "summed": [d for d in can.dtypes if d is not torch.bool],
            "primitive": list(bodies.PRIMITIVES),
            "method": list(bodies.METHODS),
            "moving": list(bodies.MOVING),
            "linear": list(PRIMITIVES),
            "mapping": list(law.MAPPINGS),
            "layer": list(matrix.AXES),
            "precision": [name for name, dtype in matrix.DTYPES.items() if dtype in can.dtypes],
        }

    def cases(self, test: str, run: Run) -> Iterator[dict[str, Any]]:
        """The arguments of each call of ``test``."""
        choices = self.choices() | {"run": [run]}
        names = inspect.signature(getattr(self, test)).parameters
        for values in itertools.product(*(choices[n] for n in names)):
            yield dict(zip(names, values, strict=True))

    def _check(self, results: list[list[str]]) -> None:
        matrix.report(results)

    def test_declaration(self) -> None:
        """The class is complete, has this version of the interface, declares enough, and can run here."""
        cls = self.backend_class()
        problem = unfit(cls) or cls.unavailable()
        if problem:
            raise AssertionError(problem)

    def test_there_are_ranks(self) -> None:
        """One rank has nothing to test. Start the kit with ``mpirun -n 2`` or ``torchrun``."""
        if max(type(self).worlds or (launched_world(),)) < 2:
            raise AssertionError(
                "one rank alone makes no collectives: mpirun -n 2 python -m pytest ..., or\n"
                "torchrun --nproc_per_node=2 -m pytest ..."
            )

    def test_joined(self, run: Run, line: Mesh) -> None:
        """A failure is in ``start`` or in making a Transport: rank, size, members, device."""
        self._check(run(line, bodies.joined))

    def test_values(self, run: Run, line: Mesh, primitive: str, dtype: torch.dtype) -> None:
        """A failure is in the result of this primitive for some dim or dtype."""
        self._check(run(line, bodies.right_values, primitive, dtype))

    def test_moved_dtypes(self, run: Run, line: Mesh, moving: str, moved: torch.dtype) -> None:
        """A failure is in moving a dtype that is declared as moved only."""
        self._check(run(line, bodies.right_values, moving, moved))

    def test_strides(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in how this primitive reads an input that is not contiguous."""
        self._check(run(line, memory.strided, primitive))

    def test_empty(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in how this primitive treats tensors without elements."""
        self._check(run(line, bodies.empty, primitive))

    def test_memory(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in this primitive's use of memory: its input, its output, a buffer of its own."""
        self._check(run(line, memory.memory, primitive))

    def test_donated(self, run: Run, line: Mesh) -> None:
        """A failure is in what is written to memory that the caller has given away."""
        self._check(run(line, memory.donated))

    def test_overlap(self, run: Run, line: Mesh) -> None:
        """A failure is in a method that starts: results mixed up between several under way."""
        self._check(run(line, bodies.overlapped))

    def test_large(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in how this primitive splits large data, or sends before it receives."""
        self._check(run(line, edges.large, primitive, type(self).large))

    def test_sizes(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in what this primitive keeps, or returns for a copy, from some size on."""
        self._check(run(line, edges.owned, primitive, type(self).most))

    def test_no_dims(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in the shape of the result for a tensor without dims."""
        self._check(run(line, edges.without_dims, primitive))

    def test_odd_values(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in this primitive's result for NaN, infinity or negative numbers."""
        self._check(run(line, edges.odd_values, primitive, type(self).loses))

    def test_odd_memory(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in how this primitive reads its input: a storage offset, or strides of 0."""
        self._check(run(line, memory.odd_memory, primitive))

    def test_again(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in data that is reused for similar calls: buffers, views, plans."""
        self._check(run(line, memory.again, primitive))

    def test_modes(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in memory that is made under ``inference_mode`` and used outside, or the reverse."""
        self._check(run(line, memory.any_mode, primitive))

    def test_precision(self, run: Run, line: Mesh, summed: torch.dtype) -> None:
        """A failure is in the dtype of a sum."""
        self._check(run(line, edges.precise, summed))

    def test_started(self, run: Run, line: Mesh) -> None:
        """A failure is in when a method that starts reads its input, or in a second wait."""
        self._check(run(line, edges.started))

    def test_mixed(self, run: Run, line: Mesh) -> None:
        """A failure is in state that one collective leaves for another."""
        self._check(run(line, bodies.mixed))

    def test_many(self, run: Run, first: Mesh, method: str) -> None:
        """A failure is in state that one call leaves for the next: a counter, a ring of buffers."""
        self._check(run(first, bodies.many, method, type(self).calls))

    def test_same_bits(self, run: Run, line: Mesh) -> None:
        """A failure is in the order of a sum, which must be the same on every rank, at every size."""
        self._check(run(line, edges.same_bits, type(self).most))

    def test_groups(self, run: Run, grid: Mesh, primitive: str) -> None:
        """A failure is in ``connect``: the ranks of a group, or their order."""
        self._check(run(grid, bodies.groups, primitive))

    def test_interleaved(self, run: Run, grid: Mesh) -> None:
        """A failure is in state that groups share."""
        self._check(run(grid, edges.interleaved))

    def test_freed(self, run: Run, first: Mesh) -> None:
        """A failure is in memory that stays in use after its result is dropped."""
        self._check(run(first, memory.freed))

    def test_lost_ranks(self, run: Run, first: Mesh) -> None:
        """A failure is in the time-out, or in what a rank gets that waits for a lost one."""
        if not type(self).starts:
            raise SkipTest("starts = False: the launcher of this backend ends a job in which a rank is lost")
        self._check(run(first, lost.lost, lost.Losses(self.backend_class(), type(self).patience)))

    def test_transposes(self, run: Run, line: Mesh, linear: str) -> None:
        """A failure here alone is in state that a primitive leaves for its transpose."""
        self._check(run(line, law.primitive_law, linear))

    def test_transpose_law(self, run: Run, line: Mesh, mapping: str) -> None:
        """A failure here alone is in collectives made during backward."""
        self._check(run(line, law.transpose_law, mapping))

    def test_random_streams(self, run: Run, line: Mesh) -> None:
        """A failure is in ``manual_seed``, ``get_rng_state`` or ``set_rng_state``."""
        self._check(run(line, programs.random_streams))

    def test_float32(self, run: Run, first: Mesh) -> None:
        """A failure is in a setting: float32 matmuls take fewer bits, as TF32 does, and so will the layers' tests."""
        self._check(run(first, edges.full_float32))

    def test_layers(self, run: Run, line: Mesh, layer: str, precision: str) -> None:
        """A failure here alone is in how the backend's device computes, or in a shape no other test has."""
        some = matrix.cases(layer, precision)
        self._check(run(line, matrix.run, some[:: type(self).every if len(some) > 20 else 1]))

    def test_training(self, run: Run, square: Mesh) -> None:
        """A failure here alone is in dp combined with tp: mean of gradients, clipping, the step."""
        self._check(run(square, programs.training_step))

    def test_pipeline(self, run: Run, staged: Mesh) -> None:
        """A failure here alone is in pp combined with tp: ``permute`` in backward, or between layers."""
        self._check(run(staged, stages.pipeline_step))

    def test_checkpoint(self, run: Run, line: Mesh) -> None:
        """A failure is in gathering bytes, or in ``device``: loaded values differ from the saved ones."""
        self._check(run(line, programs.checkpoint_round_trip))

    def test_traces(self, run: Run, line: Mesh) -> None:
        """A failure is in ``trace`` or ``load_program``; without declared tracing, in not refusing it."""
        self._check(run(line, programs.traced_program))
