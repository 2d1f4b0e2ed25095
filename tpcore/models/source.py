"""Reads the source of a forward for facts on which a cut depends."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any


def definition_of(function: Callable[..., Any]) -> ast.stmt | None:
    """The syntax tree of a function inside its decorators; None without source."""
    return _parsed(inspect.unwrap(getattr(function, "__func__", function)))  # of no object, which would be kept


@cache
def _parsed(function: Callable[..., Any]) -> ast.stmt | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None


def says(function: Callable[..., Any], pattern: str) -> bool:
    """Whether ``pattern`` occurs in the code of a function, as ``ast.unparse`` writes it, without its docstring."""
    definition = definition_of(function)
    body = [] if definition is None else getattr(definition, "body", [definition])
    statements = [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    return any(re.search(pattern, ast.unparse(node)) for node in statements)


def _parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def asks_loss_function(forward: Callable[..., Any]) -> bool:
    """Whether a forward calls ``self.loss_function`` and uses its logits only elementwise. A forward that indexes the
    vocabulary dim of its logits or reads their shape needs all of them."""
    tree = definition_of(forward)
    if tree is None or not says(forward, r"\.loss_function\b"):
        return False
    parents = _parents(tree)
    logits = [node for node in parents if isinstance(node, ast.Name) and node.id == "logits"]
    return bool(logits) and all(_elementwise(node, parents) for node in logits)


_POINTWISE = {"float", "to", "tanh", "loss_function"}


def _elementwise(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents[node]
    if isinstance(parent, ast.Attribute):
        return parent.attr in {"float", "to", "dtype", "device"}
    if isinstance(parent, ast.Call):
        return getattr(parent.func, "attr", "") in _POINTWISE
    if isinstance(parent, ast.keyword):
        function = getattr(parents[parent], "func", None)
        name = str(getattr(function, "attr", None) or getattr(function, "id", ""))
        return name in _POINTWISE or "Output" in name
    if isinstance(parent, ast.BinOp):
        return isinstance(parent.op, ast.Mult | ast.Div)
    return isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Tuple | ast.Return)


def argument_of_calls(forward: Callable[..., Any], children: set[str]) -> str | None:
    """The argument that a forward passes to each of ``children`` and of which it reads only the shape
    otherwise; None if there is none."""
    tree = definition_of(forward)
    parents = {} if tree is None else _parents(tree)
    calls = [node for node in parents if isinstance(node, ast.Call) and own_call(node) in children]
    names = {getattr(call.args[0], "id", "") if len(call.args) == 1 else "" for call in calls}
    if {own_call(call) for call in calls} != children or len(names) != 1:
        return None
    (name,) = names
    if name not in inspect.signature(forward).parameters:
        return None
    uses = [node for node in parents if isinstance(node, ast.Name) and node.id == name]
    return name if all(_of_call_or_shape(node, parents[node], children) for node in uses) else None


def own_call(node: ast.Call) -> str:
    """The ``name`` in a call ``self.name(...)`` or ``self.name[...](...)``, else ""."""
    function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    on_self = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "self"
    return function.attr if on_self and isinstance(function, ast.Attribute) else ""


def _of_call_or_shape(node: ast.Name, parent: ast.AST, children: set[str]) -> bool:
    if isinstance(parent, ast.Attribute):
        return parent.attr in {"shape", "size", "dtype", "device", "ndim"}
    return isinstance(parent, ast.Call) and own_call(parent) in children and isinstance(node.ctx, ast.Load)
