"""Whose a forward is, what it takes, and in one of transformers' own the input that several layers share."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from torch import nn

from tpcore.layers.adopt import HOOKED
from tpcore.private import BACKWARD_HOOKS, FORWARD_HOOKS

from ..private import of_transformers

OURS = ("tpcore.", "tpcore_")
_OWN = ("transformers.", *OURS, "torch.")
"""Where the functions are of which a forward of transformers consists, its decorators with it."""
_BY_TOKEN = {nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.ReLU, nn.SiLU, nn.GELU}
_BY_TOKEN |= {nn.Tanh, nn.Sigmoid, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Sequential}


def is_own(module: nn.Module) -> bool:
    """Whether its forward is that of a class of transformers, neither a user's nor changed by one."""
    function: Any = type(module).forward
    inside: list[Any] = []
    # a wrapper may name itself as what it wraps
    while getattr(function, "__globals__", {"__name__": ""})["__name__"].startswith(_OWN) and function not in inside:
        inside.append(function)
        function = getattr(function, "__wrapped__", function)
    own = bool(inside) and function in inside
    return own and of_transformers(type(module)) and "forward" not in vars(module)


def is_known(module: nn.Module) -> bool:
    """Whether its forward is tpcore's or transformers' own, or torch's of one token at a time, or of nothing."""
    return type(module) in _BY_TOKEN or type(module).__module__.startswith(OURS) or is_own(module)


def classes(module: nn.Module) -> list[type[nn.Module]]:
    """Those of what is in it."""
    return [type(child) for child in module.children()]


def is_watched(module: nn.Module, own: tuple[str, ...] = _OWN) -> bool:
    """Whether code that is not in ``own`` may see what enters or leaves: a hook, or a forward set on it."""
    if "forward" in vars(module) or HOOKED in vars(module):
        return True
    hooks = [hook for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS) for hook in vars(module)[name].values()]
    made = [hook.func if isinstance(hook, partial) else hook for hook in hooks]
    return any(not str(getattr(hook, "__module__", "")).startswith(own) for hook in made)


def is_refilled(module: nn.Module, inside: list[type[nn.Module]]) -> bool:
    """Whether since it had the classes ``inside`` it got a module that is neither known nor an adapter around one."""
    new = [m for m in module.children() if type(m) not in inside]
    return not all(type(m).__module__.startswith("peft.") or is_known(m) for m in new)


@cache
def _definition_of(function: Callable[..., Any]) -> ast.stmt | None:
    """The syntax tree of a function; None without source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None


def argument_of_calls(module: nn.Module, children: set[str]) -> str | None:
    """The argument that the forward of a module of transformers passes to each of ``children``, and of which it reads
    only the shape otherwise; None if there is none."""
    # of the source, for no run shows what a forward does not read: what is not found costs collectives, and no number
    forward = type(module).forward
    tree = _definition_of(inspect.unwrap(forward)) if is_own(module) else None
    nodes = [] if tree is None else ast.walk(tree)
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    calls = [node for node in parents if isinstance(node, ast.Call) and _own_call(node) in children]
    names = {getattr(call.args[0], "id", "") if len(call.args) == 1 else "" for call in calls}
    if {_own_call(call) for call in calls} != children or len(names) != 1:
        return None
    (name,) = names
    if name not in inspect.signature(forward).parameters:
        return None
    uses = [node for node in parents if isinstance(node, ast.Name) and node.id == name]
    return name if all(_of_call_or_shape(node, parents[node], children) for node in uses) else None


def _own_call(node: ast.Call) -> str:
    """The ``name`` in a call ``self.name(...)`` or ``self.name[...](...)``, else ""."""
    function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    on_self = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "self"
    return function.attr if on_self and isinstance(function, ast.Attribute) else ""


def _of_call_or_shape(node: ast.Name, parent: ast.AST, children: set[str]) -> bool:
    if isinstance(parent, ast.Attribute):
        return parent.attr in {"shape", "size", "dtype", "device", "ndim"}
    return isinstance(parent, ast.Call) and _own_call(parent) in children and isinstance(node.ctx, ast.Load)


CACHES = ("past_key_values", "cache")
"""What releases of transformers call keys and values of earlier tokens, in arguments and in outputs."""


def _signatures(module: nn.Module) -> Iterator[list[str]]:
    """Names of arguments of ``module.forward``, then, where it passes others on, of the classes above it."""
    above = [vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind)]
    for forward in (module.forward, *above):
        parameters = inspect.signature(forward).parameters.values()
        yield [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            return


def takes(module: nn.Module, name: str) -> bool:
    return any(name in names for names in _signatures(module))


def cache_argument(module: nn.Module) -> str | None:
    """The argument for keys and values of earlier tokens; None without one."""
    return next((name for names in _signatures(module) for name in CACHES if name in names), None)


def cache_of(output: Mapping[str, Any]) -> Any:
    """The keys and values in a model's output; None without any."""
    return next((value for name, value in output.items() if name in CACHES), None)


def named(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by their names."""
    names = dict.fromkeys(name for names in _signatures(module) for name in names)
    return dict(zip(names, args, strict=False)) | dict(kwargs)
