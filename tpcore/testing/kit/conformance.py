"""The conformance kit: what every backend must do, as tests that pytest collects from one subclass.

    from tpcore.testing.conformance import Conformance

    class TestMine(Conformance):
        backend = "mine"

Started by what starts the backend's ranks (``mpirun -n 4 python -m pytest``, ``torchrun --nproc_per_node=4
-m pytest``), every rank runs every test. The order is from the simple to the composed: the first failure
names the fault, and later ones are often its consequence.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import pytest
import torch

from ... import settings
from ...backend.interface import Backend
from ...backend.registry import backend_class, load_backend, unfit
from ...consensus import gather_bytes
from ...context import ParallelContext, use
from ...errors import BackendError
from ...mesh import Mesh
from ...transport import PRIMITIVES
from .. import matrix
from . import collectives as bodies
from . import mappings as law
from . import programs

Run = Callable[..., list[list[str]]]
"""``run(mesh, fn, *args)`` calls ``fn(ctx, *args)`` on every rank and returns what ranks found wrong."""

_NAMES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Launched:
    """This process is one rank of a job that a launcher started: the backend finds out which.

    A rank that fails alone leaves the others in a collective, and not every transport tells them. So a rank
    whose error the others do not come to hear within ``grace`` seconds ends its process, upon which launchers
    end the others'; and so does a rank that is ``timeout + grace`` seconds in one test. ``say``: prints what
    that was, past whatever captures output.
    """

    def __init__(
        self,
        name: str,
        timeout: float = 60.0,
        grace: float = 10.0,
        say: Callable[[str], object] = sys.stderr.write,
    ) -> None:
        self.backend = load_backend(name)
        self._timeout, self._grace, self._say = timeout, grace, say
        self.rank, self.world = self.backend.start(timeout)
        self._contexts: dict[tuple[tuple[str, int], ...], ParallelContext] = {}

    def run(self, mesh: Mesh, fn: Callable[..., list[str]], *args: Any) -> list[list[str]]:
        key = tuple(mesh.axes.items())
        ctx = self._contexts.setdefault(key, ParallelContext(self.backend, mesh, self.rank))
        limit, what = self._timeout + self._grace, f"rank {self.rank} did not come to an end"
        try:
            with use(ctx), self._within(limit, what):
                found, failed = fn(ctx, *args), False
        except Exception as e:  # noqa: BLE001  told to the other ranks, which else would go on to the next test
            found, failed = [f"rank {self.rank}: {type(e).__name__}: {e}"], True
            limit, what = self._grace, f"{found[0]}\nThe other ranks did not come to hear of it"
        if self.world == 1:
            return [found]
        try:
            with self._within(limit, what):
                return [t.decode().splitlines() for t in gather_bytes("\n".join(found).encode(), ctx.world)]
        except BackendError:  # the others are in another collective, as a backend that compares finds
            if not failed:
                raise
            self._end(what)

    @contextmanager
    def _within(self, seconds: float, what: str) -> Iterator[None]:
        """End this process, and so the job, if the block takes longer."""

        timer = threading.Timer(seconds, self._end, [f"{what} within {seconds:g} s"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self, why: str) -> NoReturn:
        test = settings.TEST.text() or "the test"
        self._say(f"\ntpcore: {test}: {why}: this process ends here\n")
        os._exit(1)

    def close(self) -> None:
        self.backend.stop()


def launched_world() -> int:
    """How many ranks the launcher of this process started, as torchrun, OpenMPI, MPICH or Slurm tell it."""
    sizes = (settings.WORLD_SIZE, settings.OPENMPI_SIZE, settings.MPICH_SIZE, settings.SLURM_SIZE)
    return next((size.get() for size in sizes if size.is_set), 1)


def meshes(world: int) -> list[Mesh]:
    """Every way to lay out ``world`` ranks on two or three axes with at least two ranks on two of them."""
    out = []
    for pp in (n for n in range(1, world + 1) if world % n == 0):
        for dp in (n for n in range(1, world // pp + 1) if (world // pp) % n == 0):
            sizes = {"pp": pp, "dp": dp, "tp": world // pp // dp}
            if sum(n > 1 for n in sizes.values()) > 1:
                out.append(Mesh(sizes))
                if pp == 1:
                    out.append(Mesh({"dp": dp, "tp": world // dp}))
    return out


def _label(value: Any) -> str:
    if isinstance(value, Mesh):
        return "x".join(f"{k}{v}" for k, v in value.axes.items())
    return str(value).removeprefix("torch.").replace(" ", "-")


class Conformance:
    """Subclass it in a test file and name the backend. ``worlds``: how many ranks the tests run on, by
    default as many as the launcher started; a class whose ``run`` fixture starts its own ranks says which.
    """

    backend: ClassVar[str]
    worlds: ClassVar[tuple[int, ...]] = ()
    grace: ClassVar[float] = 10.0
    """Seconds after which a rank that failed alone ends the job (see ``Launched``)."""
    every: ClassVar[int] = 7
    """One of how many cases of each layer to run: 7 divides the length of no axis, so all values come up."""

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, request: pytest.FixtureRequest) -> Iterator[Run]:
        """How ranks are run; override it for a backend that needs no launcher."""
        capture = request.config.pluginmanager.get_plugin("capturemanager")

        def say(message: str) -> None:
            if capture is not None:
                capture.suspend_global_capture()
            sys.stderr.write(message)
            sys.stderr.flush()

        job = Launched(cls.backend, grace=cls.grace, say=say)
        yield job.run
        job.close()

    def backend_class(self) -> type[Backend]:
        return backend_class(type(self).backend)

    def choices(self) -> dict[str, list[Any]]:
        """The values that each argument of a test takes."""
        can = self.backend_class().capabilities
        worlds = type(self).worlds or (launched_world(),)
        layers = [name for name, dtype in _NAMES.items() if dtype in can.dtypes]
        return {
            "line": [Mesh({"dp": 1, "tp": n}) for n in worlds],
            "grid": [m for n in worlds for m in meshes(n)],
            "square": [
                Mesh({"dp": n // t, "tp": t}) for n in worlds for t in {n, n // 2} if t and n % t == 0
            ],
            "dtype": list(can.dtypes),
            "moved": list(can.moved),
            "primitive": list(bodies.PRIMITIVES),
            "moving": list(bodies.MOVING),
            "linear": list(PRIMITIVES),
            "mapping": list(law.MAPPINGS),
            "layer": list(matrix.AXES),
            "precision": layers,
        }

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        choices = self.choices()
        for name in reversed([n for n in choices if n in metafunc.fixturenames]):
            metafunc.parametrize(name, choices[name], ids=_label)

    def _check(self, results: list[list[str]]) -> None:
        matrix.report(results)

    def test_declaration(self) -> None:
        """The class is complete, of this version of the interface, declares enough, and can run here."""
        cls = self.backend_class()
        problem = unfit(cls) or cls.unavailable()
        if problem:
            pytest.fail(problem, pytrace=False)

    def test_there_are_ranks(self) -> None:
        """Alone there is nothing to test. Start the kit with ``mpirun -n 2`` or ``torchrun``."""
        if max(type(self).worlds or (launched_world(),)) < 2:
            pytest.fail(
                "one rank alone makes no collectives: mpirun -n 2 python -m pytest ..., or\n"
                "torchrun --nproc_per_node=2 -m pytest ...",
                pytrace=False,
            )

    def test_joined(self, run: Run, line: Mesh) -> None:
        """A failure is in ``start`` or in how a Transport is made: rank, size, members, device."""
        self._check(run(line, bodies.joined))

    def test_values(self, run: Run, line: Mesh, primitive: str, dtype: torch.dtype) -> None:
        """A failure is in this primitive: what it computes, for some dim or dtype."""
        self._check(run(line, bodies.right_values, primitive, dtype))

    def test_moved_dtypes(self, run: Run, line: Mesh, moving: str, moved: torch.dtype) -> None:
        """A failure is in how a dtype travels that is declared as moved only."""
        self._check(run(line, bodies.right_values, moving, moved))

    def test_strides(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in how this primitive reads an input that is not contiguous."""
        self._check(run(line, bodies.strided, primitive))

    def test_empty(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in how this primitive treats tensors without elements."""
        self._check(run(line, bodies.empty, primitive))

    def test_memory(self, run: Run, line: Mesh, primitive: str) -> None:
        """A failure is in what this primitive does to memory: its input, its output, a buffer of its own."""
        self._check(run(line, bodies.memory, primitive))

    def test_overlap(self, run: Run, line: Mesh) -> None:
        """A failure is in ``start_all_reduce``: results mixed up between several under way."""
        self._check(run(line, bodies.overlapped))

    def test_many(self, run: Run, line: Mesh) -> None:
        """A failure is in state that one collective leaves for the next."""
        self._check(run(line, bodies.many))

    def test_same_bits(self, run: Run, line: Mesh) -> None:
        """A failure is in the order of a sum: every rank must add in the same."""
        self._check(run(line, bodies.replicated))

    def test_groups(self, run: Run, grid: Mesh, primitive: str) -> None:
        """A failure is in ``connect``: which ranks form a group, and in which order."""
        self._check(run(grid, bodies.groups, primitive))

    def test_transposes(self, run: Run, line: Mesh, linear: str) -> None:
        """A failure here alone is in state that a primitive leaves for its transpose."""
        self._check(run(line, law.primitive_law, linear))

    def test_transpose_law(self, run: Run, line: Mesh, mapping: str) -> None:
        """A failure here alone is in collectives made during backward."""
        self._check(run(line, law.transpose_law, mapping))

    def test_random_streams(self, run: Run, line: Mesh) -> None:
        """A failure is in ``manual_seed``, ``get_rng_state`` or ``set_rng_state``."""
        self._check(run(line, programs.random_streams))

    def test_layers(self, run: Run, line: Mesh, layer: str, precision: str) -> None:
        """A failure here alone is in how the backend's device computes, or in a shape no other test has."""
        some = matrix.cases(layer, precision)
        self._check(run(line, matrix.run, some[:: type(self).every if len(some) > 20 else 1]))

    def test_training(self, run: Run, square: Mesh) -> None:
        """A failure here alone is in dp and tp together: reduced gradients, clipping, an optimizer's step."""
        self._check(run(square, programs.training_step))

    def test_checkpoint(self, run: Run, line: Mesh) -> None:
        """A failure is in gathering bytes, or in ``device``: what is saved is not what is read back."""
        self._check(run(line, programs.checkpoint_round_trip))

    def test_traces(self, run: Run, line: Mesh) -> None:
        """A failure is in ``trace`` or ``load_program``; where no tracing is declared, in not refusing it."""
        self._check(run(line, programs.traced_program))
