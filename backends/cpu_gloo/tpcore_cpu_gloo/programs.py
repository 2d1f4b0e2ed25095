"""Traced programs: graphs of torch.export without weights, the same for all ranks, as JSON: names of operators and
their arguments, and nothing executable. torch.export's own file format is not used: it pickles values that it cannot
serialize otherwise, and reading it imports a symbolic algebra system, which takes 1.5 s in each process that starts."""

from __future__ import annotations

import json
import keyword
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from tpcore.runtime.consensus import check_one_program

GRAPH, CONSTANTS = "graph.json", "constants.safetensors"
_BEFORE = "tpcore_cpu_gloo"  # the namespace in files of earlier versions
JSON = Any
_ON_NUMBERS = "add sub mul truediv floordiv mod neg pow lt le gt ge eq ne and_ or_ not_ lshift rshift getitem"
_PYTHON: dict[str, Any] = {f"operator.{name}": getattr(operator, name) for name in _ON_NUMBERS.split()}
_PYTHON |= {f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")}
_PYTHON |= {f"torch.{n}": f for n, f in vars(torch).items() if n.startswith(("sym_", "_sym_"))}
_REFUSED = ("aten::from_file",)  # opens files
_OF_TORCH = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
Target = Callable[..., Any]


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
    data = save({name: t.contiguous() for name, t in constants.items()})
    nodes = [json.dumps(node) for node in program["nodes"]]
    rest = json.dumps({**program, "nodes": []})
    check_one_program("\n".join([*nodes, rest]).encode(), data, world)
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
        constants = load_file(folder / CONSTANTS)
        module = from_json(program, _replacements(comm_of, program["groups"]))
        given = [weights[name] for name in program["weights"]]
        given += [comm_of(axes).position for axes in program["groups"]]
        fixed = [constants[name] if name else None for name in program["inputs"]]
        places = [at for at, name in enumerate(program["inputs"]) if name is None]
        for at, t in zip(places, given, strict=False):
            fixed[at] = t
    except BackendError:
        raise
    except Exception as e:  # a damaged file can raise any error
        raise BackendError(f"{folder / GRAPH} is damaged: {type(e).__name__}: {str(e)[:200]}") from e
    run, free = module.forward, places[len(given) :]

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

        def run(x: Tensor, *given: Any) -> Tensor:
            result: Tensor = methods[given[-1]](x, **dict(zip(names, given, strict=False)))
            return result

        return run

    of = {f"{space}::{p.name}.default": call(p) for space in (NAMESPACE, _BEFORE) for p in TABLE}
    return {"aten::_assert_async.msg": _assert, f"{OPERATOR}.default": one_by_one, **of}


class _Made(NamedTuple):
    nodes: dict[str, Node]
    graphs: dict[str, str]


def to_json(module: GraphModule) -> JSON:
    """The nodes of a graph in order, and the graphs that it calls. BackendError for what this form does not hold."""
    graphs = {}
    for name in dict.fromkeys(str(n.target) for n in module.graph.nodes if n.op == "get_attr"):
        inner = getattr(module, name)
        if not isinstance(inner, GraphModule):
            raise BackendError(f"the graph holds {name!r}, a {type(inner).__name__}, which no program can hold")
        graphs[name] = to_json(inner)
    nodes = [_node(n) for n in module.graph.nodes if n.op != "get_attr"]
    return {"nodes": nodes, **({"graphs": graphs} if graphs else {})}


def _node(node: Node) -> JSON:
    if node.op == "placeholder":
        return [node.name, "input"]
    if node.op == "output":
        return [node.name, "output", _to_json(node.args[0])]
    if node.op != "call_function":
        raise BackendError(f"the graph has a node {node.format_node()}, which no program can hold")
    kwargs = {name: _to_json(value) for name, value in node.kwargs.items()}
    return [node.name, _name_of(node.target), [_to_json(a) for a in node.args], *([kwargs] if kwargs else [])]


def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}::{target._schema.name.partition('::')[2]}.{target._overloadname}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target.name()}"
    for name, function in _PYTHON.items():
        if function is target:
            return name
    raise BackendError(f"the graph calls {target!r}, which no program can hold")


def _to_json(value: Any) -> JSON:
    """One argument. A value that JSON does not support becomes a dict with one entry."""
    if isinstance(value, Node):
        return {"graph": str(value.target)} if value.op == "get_attr" else {"node": value.name}
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list | tuple):
        return [_to_json(v) for v in value]
    if isinstance(value, dict):
        return {"dict": {str(k): _to_json(v) for k, v in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_to_json(v) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    kind = _OF_TORCH.get(type(value))
    if kind is None:
        raise BackendError(f"the graph passes {value!r} to an operator, which no program can hold")
    return {kind: str(value).removeprefix("torch.")}


def from_json(data: JSON, instead: Mapping[str, Target]) -> GraphModule:
    """The graph of ``to_json``. ``instead``: functions in place of operators. torch.fx generates Python source, into
    which text of ``data`` gets only as literals: nodes and graphs get new names, operators are looked up, names of
    arguments are checked. Raises KeyError, TypeError and the like for damaged data, BackendError for an unknown
    operator."""
    root, graph, made = nn.Module(), Graph(), _Made({}, {})
    for number, (name, inner) in enumerate(data.get("graphs", {}).items()):
        made.graphs[name] = f"graph{number}"
        setattr(root, made.graphs[name], from_json(inner, instead))
    for number, (name, target, *rest) in enumerate(data["nodes"]):
        if target == "input":
            made.nodes[name] = graph.placeholder(f"n{number}")
        elif target == "output":
            graph.output(_value_of(rest[0], graph, made))
        else:
            call = instead[target] if target in instead else _target(target)
            args, kwargs = (_value_of(given, graph, made) for given in (rest[0], {"dict": (rest[1:] or [{}])[0]}))
            if wrong := [k for k in kwargs if not k.isidentifier() or keyword.iskeyword(k)]:
                raise TypeError(f"{wrong[0]!r} is no name of an argument")
            made.nodes[name] = graph.create_node("call_function", call, tuple(args), kwargs, f"n{number}")
    return GraphModule(root, graph)


def _target(name: str) -> Target:
    """An operator of torch, of a loaded library, or of Python on numbers."""
    space, _, rest = name.partition("::")
    found: Target | None = _PYTHON.get(name)
    if rest and space == "higher_order":
        found = getattr(torch.ops.higher_order, rest, None)
        found = found if isinstance(found, torch._ops.HigherOrderOperator) else None
    elif rest and not name.startswith(_REFUSED):
        packet, _, overload = rest.rpartition(".")
        found = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
        found = found if isinstance(found, torch._ops.OpOverload) else None
    if found is None:
        raise BackendError(f"operator {name} is not in this process: import what defines it, or torch is too old")
    return found


def _value_of(value: JSON, graph: Graph, made: _Made) -> Any:
    if isinstance(value, list):
        return [_value_of(v, graph, made) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        return made.nodes[inner]
    if kind == "graph":
        return graph.get_attr(made.graphs[inner])
    if kind == "dict":
        return {k: _value_of(v, graph, made) for k, v in inner.items()}
    if kind == "slice":
        return slice(*(_value_of(v, graph, made) for v in inner))
    if kind == "float":
        return float(inner)
    if kind == "device":
        return torch.device(inner)
    found = getattr(torch, inner)
    if _OF_TORCH.get(type(found)) != kind:
        raise TypeError(f"torch.{inner} is no {kind}")
    return found
