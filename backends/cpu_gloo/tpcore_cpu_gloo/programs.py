"""Traced programs on CPUs: their graphs, and where it is faster machine code beside them."""

from __future__ import annotations

import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tpcore.backend.grouped import OPERATOR, one_by_one
from tpcore.backend.interface import Dims, Function, LoadedProgram
from tpcore.comm.comm import Comm
from tpcore.comm.transport import Primitive, Transport
from tpcore.comm.wrapper import DelegatingTransport
from tpcore.errors import BackendError
from tpcore.log import inform
from tpcore.runtime.consensus import gather
from tpcore.trace import programs
from tpcore.trace.graph import JSON, Target, from_json
from tpcore.trace.programs import CONSTANTS


def trace(
    fn: Function,
    weights: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    dims: Dims,
    comms: Sequence[Comm],
    world: Comm,
    folder: Path,
    *,
    inductor: bool = False,
) -> None:
    """Write the program of ``fn``. ``comms``: the Comms that it may use, one for each group. ``inductor``: as machine
    code too, where that is faster."""
    if not inductor:
        return programs.trace(fn, weights, inputs, dims, comms, world, folder)
    weights = {name: t.contiguous() for name, t in weights.items()}  # the code has the strides of its examples in it
    named, values = {comm.name: comm for comm in comms}, [weights[n] for n in sorted(weights)]

    def code(exported: Any, program: JSON, constants: Mapping[str, Tensor]) -> None:
        def graph(values: Sequence[Tensor]) -> LoadedProgram:
            return _of(program, constants, dict(zip(program["weights"], values, strict=True)), named.__getitem__)

        program["compiled"] = compiled(exported, graph, values, comms, inputs, folder, world)

    programs.trace(fn, weights, inputs, dims, comms, world, folder, code)


def load(folder: Path, weights: Mapping[str, Tensor], comm_of: Callable[[str], Comm]) -> LoadedProgram:
    """Load the program in ``folder``. ``comm_of``: returns the Comm of a group by its name."""
    with programs.reading(folder) as program:
        if needed := program.get("compiled"):
            if not (lacks := missing(needed)):
                comms = [comm_of(name) for name in program["groups"]]
                return _loaded(folder, [weights[name] for name in program["weights"]], comms)
            inform(f"{folder / CODE} is for {lacks}: the graph runs in its place; trace the model here again")
        return _of(program, load_file(folder / CONSTANTS), weights, comm_of)


def _loaded(folder: Path, weights: Sequence[Tensor], comms: Sequence[Comm]) -> LoadedProgram:
    try:
        return loaded(folder / CODE, weights, comms)
    except (RuntimeError, OSError) as e:
        why = " ".join(str(e).split())[:200]
        raise BackendError(f"{folder / CODE} does not load here, trace the model again on this machine: {why}") from e


def _of(
    program: JSON, constants: Mapping[str, Tensor], weights: Mapping[str, Tensor], comm_of: Callable[[str], Comm]
) -> LoadedProgram:
    """The graph of ``program`` with its weights."""
    module = from_json(program, _replacements(comm_of, program["groups"]))
    return programs.bound(module, program, constants, weights, comm_of)


def _assert(holds: Tensor, message: str) -> None:
    """The assertion in a graph, as IndexError: tpcore only asserts that ids fit a vocabulary."""
    if not holds:
        raise IndexError(message)


def _replacements(comm_of: Callable[[str], Comm], groups: Sequence[str]) -> dict[str, Target]:
    """What a graph calls in place of operators."""
    of = programs.collectives(comm_of, groups)
    return {"aten::_assert_async.msg": _assert, f"{OPERATOR}.default": one_by_one, **of}


CODE = "compiled.pt2"
WORTH = 0.98
"""Code is kept if a call takes at most this part of the graph's time: less is within what runs differ by."""
_CALLS = 9
_FAILED = ".failed"
INTERFACE = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_runtime/interface.h"


class _Noting(DelegatingTransport):
    """Notes what its collectives raise, for machine code passes on no more than that something was raised."""

    def __init__(self, inner: Transport, raised: list[BaseException]) -> None:
        super().__init__(inner)
        self._raised = raised

    def relay(self, primitive: Primitive, x: Tensor, *arguments: Any) -> Tensor:
        try:
            return super().relay(primitive, x, *arguments)
        except BaseException as e:
            self._raised.append(e)
            raise


def host() -> dict[str, Any]:
    """What code compiled here needs."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return {"torch": torch.__version__, "machine": platform.machine(), "flags": sorted(flags.split())}


def missing(needed: Mapping[str, Any]) -> str:
    """What code for ``needed`` does not find here; empty if it can run."""
    here = host()
    different = [
        f"{name} {needed[name]} and not {here[name]}" for name in ("torch", "machine") if needed[name] != here[name]
    ]
    lacking = sorted({*needed["flags"]} - {*here["flags"]})
    return ", ".join([*different, *([f"a processor with {' '.join(lacking)}"] if lacking else [])])


def compiled(
    exported: Any,
    graph: Callable[[Sequence[Tensor]], LoadedProgram],
    weights: Sequence[Tensor],
    comms: Sequence[Comm],
    inputs: Sequence[Tensor],
    folder: Path,
    world: Comm,
) -> dict[str, Any] | None:
    """Compile ``exported``, a program of ``(weights, positions, inputs)``, on the first rank, call it in turns with its
    ``graph`` on every rank, and keep the code in ``folder`` if it wins on the slowest. What it needs then; otherwise
    None, and why is said. Collective."""
    path, first, kept = folder / CODE, int(world.position) == 0, False
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.size))  # as when it is served
    try:
        problem = _told(_compile(exported, path) if first else _awaited(path), world)
        programs: list[LoadedProgram] = []
        if not problem:  # with copies, for a program may change its weights, and each has its own
            load = _Attempt(lambda: programs.append(loaded(path, [t.clone() for t in weights], comms)))
            problem = _told(load.problem, world)
        if not problem:
            programs.insert(0, graph([t.clone() for t in weights]))
            problem = _told(_Attempt(lambda: _compare(*(program(inputs) for program in programs))).problem, world)
        if problem:
            inform(f"trace: not compiled by inductor, the graph is used: {problem}")
            return None
        slowest = float(world.all_reduce(torch.tensor([_share(programs[0], programs[1], inputs)]), "max"))
        kept = slowest <= WORTH
        inform(f"trace: compiled by inductor, {slowest:.2f} of the graph's time: {'kept' if kept else 'not kept'}")
        return host() if kept else None
    finally:
        torch.set_num_threads(threads)
        if first:
            path.with_suffix(_FAILED).unlink(missing_ok=True)
            if not kept:
                path.unlink(missing_ok=True)


class _Attempt:
    """Calls ``run``. ``problem``: what it raised, in a line; empty if nothing."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.problem = ""
        try:
            run()
        except Exception as e:  # noqa: BLE001  told to all ranks: the graph is used whatever is wrong with the code
            self.problem = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"


def _told(problem: str, world: Comm) -> str:
    """The first rank's problem on all ranks."""
    return next(filter(None, gather(problem, world)), "")


def _compile(exported: Any, path: Path) -> str:
    """Write ``path``, complete when it has its name, or say why not; the other ranks wait for either."""
    part = path.with_name(f"part-{path.name}")
    options = {"cpp.dynamic_threads": True}  # those of the process that runs it, and not of the one that compiles it

    def run() -> None:
        # torch 2.9's code prints what it raises and says no more than that a call failed
        if "AOTInductorGetLastError" not in INTERFACE.read_text():
            raise BackendError(f"code of torch {torch.__version__} has no messages in its errors: use a newer torch")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its own functions
            torch._inductor.aoti_compile_and_package(exported, package_path=str(part), inductor_configs=options)
        part.rename(path)

    problem = _Attempt(run).problem
    if problem:
        part.unlink(missing_ok=True)
        path.with_suffix(_FAILED).touch()
    return problem


def _awaited(path: Path) -> str:
    """Outside of a collective, whose time is limited: the launcher ends this rank too if the first one dies."""
    while not path.exists() and not path.with_suffix(_FAILED).exists():
        time.sleep(0.05)
    return ""


def _compare(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> None:
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4, equal_nan=True)  # as tracing compares with the model


def _share(graph: LoadedProgram, code: LoadedProgram, inputs: Sequence[Tensor]) -> float:
    """The code's time as a part of the graph's: the median of calls in turns."""
    shares = []
    for _ in range(_CALLS):
        seconds = []
        for program in (graph, code):
            started = time.perf_counter()
            program(inputs)
            seconds.append(time.perf_counter() - started)
        shares.append(seconds[1] / seconds[0])
    return statistics.median(shares)


def loaded(path: Path, weights: Sequence[Tensor], comms: Sequence[Comm]) -> LoadedProgram:
    """The code in ``path``, which makes the collectives of ``comms`` by their operators."""
    run: Callable[..., Any] = torch._inductor.aoti_load_package(str(path))
    raised: list[BaseException] = []
    # code has the strides of the examples in it, which are contiguous
    fixed, positions = [t.contiguous() for t in weights], [comm.position for comm in comms]
    noting = [_Noting(comm.transport, raised) for comm in comms]

    def call(inputs: Sequence[Tensor]) -> list[Tensor]:
        raised.clear()
        with ExitStack() as stack:
            for comm, transport in zip(comms, noting, strict=True):
                stack.enter_context(comm.traced(comm.position, transport))
            try:
                return list(run(fixed, positions, [t.contiguous() for t in inputs]))
            except RuntimeError as e:
                if raised:
                    raise raised[0] from None
                if "an id does not fit" in str(e):  # as the graph says it
                    raise IndexError(str(e)) from None
                raise

    return call
