"""Traced programs: graphs of torch.export without weights, the same for all ranks, as JSON: names of operators and
their arguments, and nothing executable. torch.export's own file format is not used: it pickles values that it cannot
serialize otherwise, and reading it imports a symbolic algebra system, which takes 1.5 s in each process that starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from tpcore.backend.grouped import OPERATOR, one_by_one
from tpcore.backend.interface import Dims, DynamicDim, Function, LoadedProgram, traced
from tpcore.checkpoint.storage.files import write_file
from tpcore.comm.comm import Comm
from tpcore.comm.transport import TABLE, Primitive
from tpcore.comm.wrapper import NAMESPACE
from tpcore.errors import BackendError
from tpcore.log import inform
from tpcore.runtime.consensus import check_one_program

from .compiled import CODE, compiled, loaded, missing
from .graph import JSON, Target, from_json, to_json

GRAPH, CONSTANTS = "graph.json", "constants.safetensors"
_BEFORE = "tpcore_cpu_gloo"  # the namespace in files of earlier versions


class _PureFunction(nn.Module):
    """``fn`` with all its dependencies as inputs: weights, ranks and inputs."""

    def __init__(self, fn: Function, names: Sequence[str], comms: Sequence[Comm]) -> None:
        super().__init__()
        self._of = fn, names, comms  # a tuple, so that nn.Module registers nothing of it

    def forward(self, weights: list[Tensor], ranks: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        fn, names, comms = self._of
        with traced(comms, ranks, operators=True):
            return fn(dict(zip(names, weights, strict=True)), inputs)


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
    names = sorted(weights)
    if inductor:  # whose code has the strides of its examples in it
        weights = {name: t.contiguous() for name, t in weights.items()}
    exported = _exported(_PureFunction(fn, names, comms), [weights[n] for n in names], comms, inputs, dims)
    module: GraphModule = exported.graph_module
    specs = exported.graph_signature.input_specs
    _remove_no_ops(module.graph)
    constants = {s.target: exported.constants[s.target] for s in specs if s.kind.name != "USER_INPUT"}
    program = {
        "weights": names,
        "groups": [comm.name for comm in comms],
        "constants": list(constants),
        # in the order of the graph's inputs: the constant's name, or None for weights, ranks and inputs
        "inputs": [s.target if s.kind.name != "USER_INPUT" else None for s in specs],
        **to_json(module),
    }
    data = save({name: t.contiguous() for name, t in constants.items()})
    nodes = [json.dumps(node) for node in program["nodes"]]
    rest = json.dumps({**program, "nodes": []})
    check_one_program("\n".join([*nodes, rest]).encode(), data, world)
    if inductor:
        module.recompile()  # without the nodes that are gone
        named = {comm.name: comm for comm in comms}

        def graph(values: Sequence[Tensor]) -> LoadedProgram:
            return _of(program, constants, dict(zip(names, values, strict=True)), named.__getitem__)

        program["compiled"] = compiled(exported, graph, [weights[n] for n in names], comms, inputs, folder, world)
    if int(world.position) == 0:
        write_file(str(folder / GRAPH), [json.dumps(program, separators=(",", ":")).encode()])
        write_file(str(folder / CONSTANTS), [data])


def _exported(
    pure: _PureFunction, weights: list[Tensor], comms: Sequence[Comm], inputs: Sequence[Tensor], dims: Dims
) -> Any:
    named = {dim.name: dim for of in dims for dim in of.values()}
    known = {name: torch.export.Dim(f"d{i}", min=d.min, max=d.max) for i, (name, d) in enumerate(named.items())}
    shapes = [{at: known[d.name] for at, d in of.items()} for of in dims]
    arguments = weights, [c.position for c in comms], [_example(t, d) for t, d in zip(inputs, dims, strict=True)]
    dynamic = [None] * len(weights), [None] * len(comms), shapes
    try:
        with torch.no_grad():
            return torch.export.export(pure, arguments, dynamic_shapes=dynamic, strict=False)
    except Exception as e:
        if not known or "Constraints violated" not in str(e):
            raise
        raise ValueError(
            f"the model does not take every size of {', '.join(map(str, named.values()))}: sequence parallelism, say, "
            "takes multiples of tp only. Trace it without sequence_dim (the weights are the same), or for few sizes "
            f"with bucket_inputs. torch says: {str(e)[:500]}"
        ) from e


def _example(t: Tensor, dims: Mapping[int, DynamicDim]) -> Tensor:
    """An example input for ``t`` whose dynamic dimensions are at least 2, because torch.export treats a size
    of 1 as a constant. Contiguous, because the strides of a view (``batch[:, :-1]``) would fix the sizes."""
    size = list(t.shape)
    for at, dim in dims.items():
        size[at] = max(size[at], 2 if dim.max is None else min(2, dim.max))
    return t.contiguous() if size == list(t.shape) else t.new_zeros(size)


def _remove_no_ops(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.to.dtype and len(node.args) == 2 and not node.kwargs:
            source, dtype = node.args
            if isinstance(source, Node) and getattr(source.meta.get("val"), "dtype", None) == dtype:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
        elif node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)


def load(folder: Path, weights: Mapping[str, Tensor], comm_of: Callable[[str], Comm]) -> LoadedProgram:
    """Load the program in ``folder``. ``comm_of``: returns the Comm of a group by its name."""
    try:
        program = json.loads((folder / GRAPH).read_text())
        if needed := program.get("compiled"):
            if not (lacks := missing(needed)):
                comms = [comm_of(name) for name in program["groups"]]
                return _loaded(folder, [weights[name] for name in program["weights"]], comms)
            inform(f"{folder / CODE} is for {lacks}: the graph runs in its place; trace the model here again")
        return _of(program, load_file(folder / CONSTANTS), weights, comm_of)
    except BackendError:
        raise
    except Exception as e:  # a damaged file can raise any error
        raise BackendError(f"{folder / GRAPH} is damaged: {type(e).__name__}: {str(e)[:200]}") from e


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
    bound = [weights[name] for name in program["weights"]]
    bound += [comm_of(axes).position for axes in program["groups"]]
    fixed = [constants[name] if name else None for name in program["inputs"]]
    places = [at for at, name in enumerate(program["inputs"]) if name is None]
    for at, t in zip(places, bound, strict=False):
        fixed[at] = t
    run, free = module.forward, places[len(bound) :]

    def call(inputs: Sequence[Tensor]) -> list[Tensor]:
        args = list(fixed)
        for at, t in zip(free, inputs, strict=True):
            args[at] = t
        return list(run(*args))

    return call


def _assert(holds: Tensor, message: str) -> None:
    """The assertion in a graph, as IndexError: tpcore only asserts that ids fit a vocabulary."""
    if not holds:
        raise IndexError(message)


def _replacements(comm_of: Callable[[str], Comm], groups: Sequence[str]) -> dict[str, Target]:
    """What a graph calls in place of operators: no dispatcher (10 us), and results may be the argument's memory."""

    def call(primitive: Primitive) -> Callable[..., Tensor]:
        methods = {name: getattr(comm_of(name), primitive.name) for name in groups}
        names = tuple(primitive.arguments)

        def run(x: Tensor, *arguments: Any) -> Tensor:
            result: Tensor = methods[arguments[-1]](x, **dict(zip(names, arguments, strict=False)))
            return result

        return run

    of = {f"{space}::{p.name}.default": call(p) for space in (NAMESPACE, _BEFORE) for p in TABLE}
    return {"aten::_assert_async.msg": _assert, f"{OPERATOR}.default": one_by_one, **of}
