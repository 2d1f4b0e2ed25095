"""Traced programs as machine code, by torch's AOTInductor: for the processor and the torch that compiled it, beside the
graph, which runs everywhere."""

from __future__ import annotations

import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tpcore.backend.interface import LoadedProgram
from tpcore.comm.comm import Comm
from tpcore.comm.transport import Primitive, Transport
from tpcore.comm.wrapper import DelegatingTransport
from tpcore.log import inform
from tpcore.runtime.consensus import gather

CODE = "compiled.pt2"
WORTH = 0.98
"""Code is kept if a call takes at most this part of the graph's time: less is within what runs differ by."""
_CALLS = 9


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
    graph: LoadedProgram,
    weights: Sequence[Tensor],
    comms: Sequence[Comm],
    inputs: Sequence[Tensor],
    folder: Path,
    world: Comm,
) -> dict[str, Any] | None:
    """Compile ``exported``, a program of ``(weights, positions, inputs)``, on every rank at once, call it in turns with
    ``graph``, and keep the first rank's code in ``folder`` if it wins on the slowest. What it needs then; otherwise
    None, and why is said. Collective."""
    with TemporaryDirectory(prefix="tpcore-") as scratch:
        path = (folder if int(world.position) == 0 else Path(scratch)) / CODE
        problem = _compile(exported, path)
        if found := next(filter(None, gather(problem, world)), ""):
            inform(f"trace: inductor compiles it not, the graph is used: {found}")
        else:
            share = _share(graph, loaded(path, weights, comms), inputs)
            slowest = float(world.all_reduce(torch.tensor([share]), "max"))
            kept = slowest <= WORTH
            inform(f"trace: compiled by inductor, {slowest:.2f} of the graph's time: {'kept' if kept else 'not kept'}")
            if kept:
                return host()
        path.unlink(missing_ok=True)
    return None


def _compile(exported: Any, path: Path) -> str:
    """Why not, in a line; empty if ``path`` is written."""
    # threads are those of the process that runs it, and not of the one that compiles it
    options = {"cpp.dynamic_threads": True}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its own functions
            torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=options)
    except (RuntimeError, OSError, ValueError, TypeError, AssertionError, LookupError, ImportError) as e:
        # no compiler, an operator that it does not know, ...
        return f"{type(e).__name__}: {str(e).strip()[:300]}".splitlines()[0]
    return ""


def _share(graph: LoadedProgram, code: LoadedProgram, inputs: Sequence[Tensor]) -> float:
    """The code's time as a part of the graph's: the median of calls in turns, after one that must agree."""
    for want, got in zip(graph(inputs), code(inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
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
    positions = [comm.position for comm in comms]
    noting = [_Noting(comm.transport, raised) for comm in comms]

    def call(inputs: Sequence[Tensor]) -> list[Tensor]:
        raised.clear()
        with ExitStack() as stack:
            for comm, transport in zip(comms, noting, strict=True):
                stack.enter_context(comm.traced(comm.position, transport))
            try:
                return list(run(list(weights), positions, list(inputs)))
            except RuntimeError as e:
                if raised:
                    raise raised[0] from None
                if "an id does not fit" in str(e):  # as the graph says it
                    raise IndexError(str(e)) from None
                raise

    return call
