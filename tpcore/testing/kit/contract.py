"""The tests of the conformance kit, for pytest and for programs without it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from random import SystemRandom
from typing import Any, ClassVar
from unittest import SkipTest

from ...backend.interface import Backend
from ...backend.registry import backend_class, unfit
from ...comm.transport import PRIMITIVES
from ...layout.mesh import Mesh
from .. import matrix
from . import collectives as bodies
from . import drawn, lost, memory, programs, training
from .launched import launched_world

Run = Callable[..., list[list[str]]]
"""``run(mesh, fn, *args)`` calls ``fn(ctx, *args)`` on every rank and returns the ranks' messages."""


def meshes(world: int) -> list[Mesh]:
    """All meshes of ``world`` ranks with two or three axes of which at least two have two or more ranks."""
    out = []
    for pp, dp in itertools.product(range(1, world + 1), repeat=2):
        tp, rest = divmod(world, pp * dp)
        if rest == 0 and (pp > 1) + (dp > 1) + (tp > 1) > 1:
            out.append(Mesh({"pp": pp, "dp": dp, "tp": tp}))
            out += [Mesh({"dp": dp, "tp": tp})] if pp == 1 else []
    return out


OPTIONS = ("large", "most", "loses", "calls", "seed", "one_in")


def _test(check: Callable[..., list[str]], arguments: str) -> Any:
    """A test that runs ``check`` on every rank of the mesh, the first of the ``arguments``, with the others: values of
    ``choices``, or OPTIONS of the class. The check's docstring is the test's, and begins the message of a failure."""
    mesh, *others = arguments.split()

    def test(self: Contract, run: Run, **given: Any) -> None:
        values = [getattr(self, name) if name in OPTIONS else given[name] for name in others]
        self._check(run(given[mesh], check, *values), check.__doc__ or "")

    names = ["self", "run", *(name for name in arguments.split() if name not in OPTIONS)]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which pytest reads, and cases
    test.__doc__ = check.__doc__
    return test


class Contract:
    """The tests, from simple to composed, and the values of their arguments. ``worlds``: the numbers of ranks to
    test; default: the launcher's number."""

    backend: ClassVar[str]
    worlds: ClassVar[tuple[int, ...]] = ()
    starts: ClassVar[bool] = True
    """Whether RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment make a process a rank: the kit
    then loses ranks of jobs of its own. False for a library whose launcher alone can start ranks."""
    timeout: ClassVar[float] = 60.0
    """Seconds that a collective may wait. All other times of the kit are parts or multiples of it."""
    every: ClassVar[int] = 7
    """Run every 7th case of each layer: 7 divides the length of no axis, so all values occur."""
    large: ClassVar[Sequence[int]] = bodies.LARGE
    """Numbers of elements of large tensors."""
    most: ClassVar[int] = (1 << 18) + 1
    """Number of elements of the largest tensor that is drawn: a little more than 1 MiB of float32."""
    calls: ClassVar[int] = 1100
    """Number of small calls of each method in a row. 70,000 are more than 16 bits count."""
    seed: ClassVar[int] = SystemRandom().randrange(1 << 32)
    """Of the calls that are drawn: where pytest runs on every rank the first rank's, or that of ``--kit-seed``."""
    one_in: ClassVar[int] = 1
    """Of the product of methods, switches, dtypes and sizes, calls of one point in so many are drawn."""
    loses: ClassVar[Sequence[str]] = ()
    """Properties of odd numbers that the backend's library loses: "the sign of zero", "NaN in a maximum",
    "denormal numbers" of sums, "more than 32 bits" of whole numbers."""

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
            "staged": [m for n in worlds if (m := training.stages_mesh(Mesh({"dp": 1, "tp": n}))) is not None],
            "dtype": list(can.dtypes),
            "moved": list(can.moved),
            "primitive": list(bodies.PRIMITIVES),
            "method": list(bodies.METHODS),
            "moving": list(bodies.MOVING),
            "linear": list(PRIMITIVES),
            "mapping": list(training.MAPPINGS),
            "layer": list(matrix.AXES),
            "precision": [name for name, dtype in matrix.DTYPES.items() if dtype in can.dtypes],
        }

    def cases(self, test: str, run: Run) -> Iterator[dict[str, Any]]:
        """The arguments of each call of ``test``."""
        choices = self.choices() | {"run": [run]}
        names = inspect.signature(getattr(self, test)).parameters
        for values in itertools.product(*(choices[n] for n in names)):
            yield dict(zip(names, values, strict=True))

    def _check(self, results: list[list[str]], failure: str = "") -> None:
        matrix.report(results, failure)

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

    test_joined = _test(bodies.joined, "line")
    test_values = _test(bodies.right_values, "line primitive dtype loses")
    test_moved_dtypes = _test(bodies.right_values, "line moving moved loses")
    test_any_call = _test(drawn.any_call, "line method seed one_in most loses")
    test_under_way = _test(drawn.under_way, "line seed one_in most loses")
    test_under_way_in_groups = _test(drawn.under_way, "grid seed one_in most loses")
    test_overlap = _test(bodies.overlapped, "line")
    test_large = _test(bodies.large, "line primitive large")
    test_in_order = _test(bodies.in_order, "line dtype large")
    test_many = _test(bodies.many, "first method calls")
    test_groups = _test(bodies.groups, "grid primitive")
    test_freed = _test(memory.freed, "first")

    def test_lost_ranks(self, run: Run, first: Mesh) -> None:
        """A failure is in the time-out, or in what a rank gets that waits for a lost one."""
        if not self.starts:
            raise SkipTest("starts = False: the launcher of this backend ends a job in which a rank is lost")
        self._check(run(first, lost.lost, lost.Losses(self.backend_class(), self.timeout)))

    test_transposes = _test(training.primitive_law, "line linear")
    test_transpose_law = _test(training.transpose_law, "line mapping")
    test_random_streams = _test(programs.random_streams, "line")
    test_float32 = _test(programs.full_float32, "first")

    def test_layers(self, run: Run, line: Mesh, layer: str, precision: str) -> None:
        """A failure here alone is in how the backend's device computes, or in a shape no other test has."""
        some = matrix.cases(layer, precision)
        self._check(run(line, matrix.run, some[:: self.every if len(some) > 20 else 1]))

    test_training = _test(training.training_steps, "square")
    test_pipeline = _test(training.pipeline_steps, "staged")
    test_checkpoint = _test(programs.checkpoint_round_trip, "line")
    test_traces = _test(programs.traced_program, "line")
