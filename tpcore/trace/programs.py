"""Programs on disk: graphs of torch.export without weights, the same for all ranks, as JSON: names of operators and
their arguments, and nothing executable. torch.export's own file format is not used: it pickles values that it cannot
serialize otherwise, and reading it imports a symbolic algebra system, which takes 1.5 s in each process that starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from ..backend.interface import Dims, DynamicDim, Function, LoadedProgram, traced
from ..checkpoint.storage.files import write_file
from ..comm.comm import Comm
from ..comm.transport import TABLE, Primitive
from ..comm.wrapper import NAMESPACE
from ..errors import BackendError
from ..runtime.consensus import check_one_program
from .graph import JSON, Target, to_json

GRAPH, CONSTANTS = "graph.json", "constants.safetensors"
More = Callable[[Any, JSON, Mapping[str, Tensor]], None]
"""Adds to a program what its backend alone knows, from torch's exported one, the program, and its constants."""


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
    more: More | None = None,
) -> None:
    """Write the program of ``fn``. ``comms``: the Comms that it may use, one for each group."""
    names = sorted(weights)
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
    data = save({name: t.cpu().contiguous() for name, t in constants.items()})
    nodes = [json.dumps(node) for node in program["nodes"]]
    rest = json.dumps({**program, "nodes": []})
    check_one_program("\n".join([*nodes, rest]).encode(), data, world)
    if more is not None:
        module.recompile()  # without the nodes that are gone
        more(exported, program, constants)
    if int(world.position) == 0:
        write_file(str(folder / GRAPH), [json.dumps(program, separators=(",", ":")).encode()])
        write_file(str(folder / CONSTANTS), [data])


def _exported(
    pure: _PureFunction, weights: list[Tensor], comms: Sequence[Comm], inputs: Sequence[Tensor], dims: Dims
) -> Any:
    named = {dim.name: dim for of in dims for dim in of.values()}
    known = {name: torch.export.Dim(f"d{i}", min=d.min, max=d.max) for i, (name, d) in enumerate(named.items())}
    shapes = [{at: known[d.name] for at, d in of.items()} for of in dims]
    arguments = weights, [c.position.cpu() for c in comms], [_example(t, d) for t, d in zip(inputs, dims, strict=True)]
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


@contextmanager
def reading(folder: Path) -> Iterator[JSON]:
    """The program in ``folder``. BackendError for any error in the block: a damaged file can raise any."""
    try:
        yield json.loads((folder / GRAPH).read_text())
    except BackendError:
        raise
    except Exception as e:
        raise BackendError(f"{folder / GRAPH} is damaged: {type(e).__name__}: {str(e)[:200]}") from e


def bound(
    module: GraphModule,
    program: JSON,
    constants: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    comm_of: Callable[[str], Comm],
    run: Callable[..., Any] | None = None,
) -> LoadedProgram:
    """``program``, whose graph is ``module``, with its weights. ``run``: what calls the graph."""
    held = [weights[name] for name in program["weights"]]
    held += [comm_of(axes).position for axes in program["groups"]]
    fixed = [constants[name] if name else None for name in program["inputs"]]
    places = [at for at, name in enumerate(program["inputs"]) if name is None]
    for at, t in zip(places, held, strict=False):
        fixed[at] = t
    forward, free = module.forward if run is None else run, places[len(held) :]

    def call(inputs: Sequence[Tensor]) -> list[Tensor]:
        args = list(fixed)
        for at, t in zip(free, inputs, strict=True):
            args[at] = t
        return list(forward(*args))

    return call


def collectives(comm_of: Callable[[str], Comm], groups: Sequence[str]) -> dict[str, Target]:
    """What a graph calls in place of operators of collectives: no dispatcher (10 us), and results may be the argument's
    memory."""

    def call(primitive: Primitive) -> Callable[..., Tensor]:
        methods = {name: getattr(comm_of(name), primitive.name) for name in groups}
        names = tuple(primitive.arguments)

        def run(x: Tensor, *arguments: Any) -> Tensor:
            result: Tensor = methods[arguments[-1]](x, **dict(zip(names, arguments, strict=False)))
            return result

        return run

    return {f"{NAMESPACE}::{p.name}.default": call(p) for p in TABLE}
