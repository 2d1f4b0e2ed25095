"""Reads the source of a forward for facts on which a cut depends, and follows sharded features through it."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

from torch import nn


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


PART = "part"
"""The label of a value computed from sharded features. The other labels are names of whole modules."""
Labels = frozenset[str]
_NONE = Labels()
_DEEPEST = 3
"""Functions are read inside of functions as far as this."""
_FACTS = {"shape", "dtype", "device", "ndim", "size", "dim"}


def _stored(definition: ast.AST | None) -> set[str]:
    """The names of local variables and arguments; others are modules: torch."""
    nodes = list(ast.walk(definition)) if definition is not None else []
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names | {n.arg for n in nodes if isinstance(n, ast.arg)}


def _reachable(target: ast.AST | None) -> Iterator[ast.AST]:
    """``target`` and what may be one memory with it: no index, and no operand of a sum, whose result is new."""
    if target is not None:
        yield target
        inner = [target.value] if isinstance(target, ast.Subscript) else ast.iter_child_nodes(target)
        for child in () if isinstance(target, ast.BinOp) else inner:
            yield from _reachable(child)


class Flow:
    """One reading of the forward of ``block``, whose arguments are whole. ``columns``: names of the children whose
    outputs are sharded; ``closed``: of children whose outputs are whole again; ``others``: of whole children and of
    parameters. What is not understood is neither whole nor reached."""

    def __init__(self, block: nn.Module, columns: set[str], closed: set[str], others: Collection[str]) -> None:
        self.block, self.columns, self.closed, self.others = block, columns, closed, set(others)
        self._inputs: dict[str, set[bool]] = defaultdict(set)
        """For each child that is called: whether its input is computed from sharded features."""
        self._lost: set[str] = set()
        """Those of ``others`` whose output meets sharded features, or that are not only called."""
        self._labels: dict[str, Labels] = defaultdict(Labels)
        definition = definition_of(block.forward)
        self._locals = _stored(definition)
        self._globals: dict[str, Any] = getattr(inspect.unwrap(block.forward), "__globals__", {})
        self._returned: list[list[Labels]] = []
        self._depth = 0
        self._read(getattr(definition, "body", []), certain=True)
        if not columns <= self._inputs.keys():
            self._lost |= self.others

    def is_whole(self, name: str) -> bool:
        """Whether it is used with whole values only."""
        parameter = name in self.block._parameters
        return name not in self._lost and (parameter or self._inputs[name] == {False})

    def is_reached(self, name: str) -> bool:
        """Whether each of its inputs is computed from sharded features."""
        return name not in self._lost and self._inputs[name] == {True}

    def _read(self, body: list[ast.stmt], certain: bool) -> None:
        """``certain``: all of it surely runs, so that an assignment replaces what a variable had."""
        for s in body:
            if isinstance(s, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = s.targets if isinstance(s, ast.Assign) else [s.target]
                elements = self._elements(s.value) if isinstance(targets[0], ast.Tuple) and s.value else None
                if isinstance(targets[0], ast.Tuple) and elements and len(elements) == len(targets[0].elts):
                    for target, labels in zip(targets[0].elts, elements, strict=True):
                        self._bind(target, labels, certain)
                    continue
                value = self._value(s.value)
                for target in targets:
                    self._bind(target, value, certain and not isinstance(s, ast.AugAssign))
            elif isinstance(s, ast.FunctionDef | ast.ClassDef):
                self._lose(s)
            elif isinstance(s, ast.Return):
                values = s.value.elts if isinstance(s.value, ast.Tuple) else [s.value]
                self._returned.append([self._value(v) for v in values])
            else:
                self._branches(s)

    def _branches(self, node: ast.AST) -> None:
        for _ in range(2 if isinstance(node, ast.For | ast.While) else 1):
            if isinstance(node, ast.For | ast.comprehension):
                self._bind(node.target, self._value(node.iter), False)
            if isinstance(node, ast.withitem):
                self._bind(node.optional_vars, self._value(node.context_expr), False)
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self._read([child], certain=False)
                elif isinstance(child, ast.expr):
                    self._value(child)
                else:
                    self._branches(child)

    def _bind(self, target: ast.expr | None, value: Labels, replaces: bool) -> None:
        for node in _reachable(target):
            if isinstance(node, ast.Name) and node.id == "self":
                self._lost |= self.others if value else set()
            elif isinstance(node, ast.Name) and node.id in self._locals:
                new = replaces and isinstance(node.ctx, ast.Store)
                self._labels[node.id] = value if new else self._meet(value | self._labels[node.id])

    def _meet(self, labels: Labels) -> Labels:
        if PART in labels:
            self._lost |= labels - {PART}
        return labels

    def _lose(self, function: ast.AST) -> None:
        """Give up on what a function inside the forward, or another method, uses."""
        names = {getattr(node, "attr", "") for node in ast.walk(function)}
        self._lost |= self.others if names & (self.columns | self.closed) else self.others & names

    def _value(self, node: ast.AST | None) -> Labels:
        if node is None or (isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot)):
            return _NONE
        if isinstance(node, ast.Call):
            return self._call(node)
        parameters = self.others & self.block._parameters.keys()
        if isinstance(node, ast.Name):  # a function that is called with the block may read its parameters
            return Labels(parameters) if node.id == "self" else self._labels[node.id]
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
            self._lost |= {node.attr} & self.others - parameters
            return Labels({node.attr} & parameters)
        if isinstance(node, ast.Lambda):
            self._lose(node)
        for loop in getattr(node, "generators", []):
            self._branches(loop)
        labels = _NONE.union(*map(self._value, ast.iter_child_nodes(node)))
        if isinstance(node, ast.NamedExpr):
            self._bind(node.target, labels, False)
        if getattr(node, "attr", "") in _FACTS:
            return _NONE
        return self._meet(labels) if isinstance(node, ast.BinOp) else labels

    def _inlined(self, function: Callable[..., Any], node: ast.Call, skip: int) -> list[Labels] | None:
        """What a function returns, one entry for each element of a tuple, read with the values of this call; None
        if it is not understood. ``skip``: 1 for a method, whose first argument is the block."""
        definition = definition_of(function)
        keywords = [str(k.arg) for k in node.keywords]
        starred = any(k.arg is None for k in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args)
        if not isinstance(definition, ast.FunctionDef) or definition.args.vararg or starred or self._depth == _DEEPEST:
            return None
        names = [a.arg for a in definition.args.args][skip : len(node.args) + skip]
        values = [self._value(v) for v in (*node.args, *(k.value for k in node.keywords))]
        inner = copy.copy(self)  # what it finds of inputs and of the lost is this reading's
        inner._labels = defaultdict(Labels, zip((*names, *keywords), values, strict=True))
        inner._locals, inner._globals, inner._returned = _stored(definition), inspect.unwrap(function).__globals__, []
        inner._depth += 1
        inner._read(definition.body, certain=True)
        returned = inner._returned
        if len({len(each) for each in returned}) == 1:
            return [_NONE.union(*each) for each in zip(*returned, strict=True)]
        return [_NONE.union(*(labels for each in returned for labels in each))]

    def _elements(self, node: ast.AST) -> list[Labels] | None:
        """What a call of a function of the block's module returns, such as queries and keys with their positions."""
        name = getattr(getattr(node, "func", None), "id", "")
        function = None if name in self._locals else self._globals.get(name)
        if not isinstance(node, ast.Call) or not inspect.isfunction(function):
            return None
        return None if any(getattr(a, "id", "") == "self" for a in node.args) else self._inlined(function, node, 0)

    def _call(self, node: ast.Call) -> Labels:
        name = own_call(node)
        inputs = _NONE.union(*map(self._value, (*node.args, *(k.value for k in node.keywords))))
        if name:
            self._inputs[name].add(PART in inputs)
        if name in self.columns | self.closed:
            return Labels({PART}) if name in self.columns else _NONE
        if name in self.others and PART not in inputs:
            return inputs | {name}
        method = getattr(type(self.block), name, None) if name else None
        if inspect.isfunction(method):
            returned = self._inlined(method, node, 1)
            if returned is not None:
                return _NONE.union(*returned)
            self._lose(definition_of(method) or node)
        elif not name:
            if isinstance(node.func, ast.Attribute):  # a method may put its arguments into its object
                self._bind(node.func.value, inputs, False)
            inputs |= self._value(node.func)
        return _NONE if getattr(node.func, "attr", "") in _FACTS else self._meet(inputs)
