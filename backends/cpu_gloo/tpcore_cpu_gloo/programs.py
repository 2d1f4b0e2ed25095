"""Traced programs on CPUs: their graphs, and where it is faster machine code beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tpcore.backend.grouped import OPERATOR, one_by_one
from tpcore.backend.interface import Dims, Function, LoadedProgram
from tpcore.comm.comm import Comm
from tpcore.errors import BackendError
from tpcore.log import inform
from tpcore.trace import programs
from tpcore.trace.graph import JSON, Target, from_json
from tpcore.trace.programs import CONSTANTS

from .compiled import CODE, compiled, loaded, missing


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
