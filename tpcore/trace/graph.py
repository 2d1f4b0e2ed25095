"""A graph of torch.fx as JSON: names of operators and their arguments, and nothing executable."""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from ..errors import BackendError
from ..private import HigherOrderOperator, OpOverload

JSON = Any
_ON_NUMBERS = "add sub mul truediv floordiv mod neg pow lt le gt ge eq ne and_ or_ not_ lshift rshift getitem"
_PYTHON: dict[str, Any] = {f"operator.{name}": getattr(operator, name) for name in _ON_NUMBERS.split()}
_PYTHON |= {f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")}
_PYTHON |= {f"torch.{n}": f for n, f in vars(torch).items() if n.startswith(("sym_", "_sym_"))}
_REFUSED = ("aten::from_file",)  # opens files
_OF_TORCH = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
Target = Callable[..., Any]


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
    if isinstance(target, OpOverload):
        return str(target).replace(".", "::", 1)
    if isinstance(target, HigherOrderOperator):
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
    root, graph, names = nn.Module(), Graph(), _Made({}, {})
    for number, (name, inner) in enumerate(data.get("graphs", {}).items()):
        names.graphs[name] = f"graph{number}"
        setattr(root, names.graphs[name], from_json(inner, instead))
    for number, (name, target, *rest) in enumerate(data["nodes"]):
        if target == "input":
            names.nodes[name] = graph.placeholder(f"n{number}")
        elif target == "output":
            graph.output(_value_of(rest[0], graph, names))
        else:
            call = instead[target] if target in instead else _target(target)
            args, kwargs = (_value_of(entry, graph, names) for entry in (rest[0], {"dict": (rest[1:] or [{}])[0]}))
            if wrong := [k for k in kwargs if not k.isidentifier() or keyword.iskeyword(k)]:
                raise TypeError(f"{wrong[0]!r} is no name of an argument")
            names.nodes[name] = graph.create_node("call_function", call, tuple(args), kwargs, f"n{number}")
    return GraphModule(root, graph)


def _target(name: str) -> Target:
    """An operator of torch, of a loaded library, or of Python on numbers."""
    space, _, rest = name.partition("::")
    op: Target | None = _PYTHON.get(name)
    if rest and space == "higher_order":
        op = getattr(torch.ops.higher_order, rest, None)
        op = op if isinstance(op, HigherOrderOperator) else None
    elif rest and not name.startswith(_REFUSED):
        packet, _, overload = rest.rpartition(".")
        op = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
        op = op if isinstance(op, OpOverload) else None
    if op is None:
        raise BackendError(f"operator {name} is not in this process: import what defines it, or torch is too old")
    return op


def _value_of(value: JSON, graph: Graph, names: _Made) -> Any:
    if isinstance(value, list):
        return [_value_of(v, graph, names) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        return names.nodes[inner]
    if kind == "graph":
        return graph.get_attr(names.graphs[inner])
    if kind == "dict":
        return {k: _value_of(v, graph, names) for k, v in inner.items()}
    if kind == "slice":
        return slice(*(_value_of(v, graph, names) for v in inner))
    if kind == "float":
        return float(inner)
    if kind == "device":
        return torch.device(inner)
    constant = getattr(torch, inner)
    if _OF_TORCH.get(type(constant)) != kind:
        raise TypeError(f"torch.{inner} is no {kind}")
    return constant
