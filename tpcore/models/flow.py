"""Follows sharded features through the source of a block's forward: which of its whole modules they reach."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Collection

from torch import nn

from .source import own_call, tree_of

PART = "part"
"""The label of a value computed from sharded features. The other labels are names of whole modules."""
Labels = frozenset[str]
_NONE = Labels()
_FACTS = {"shape", "dtype", "device", "ndim", "size", "dim"}


class Flow:
    """One reading of the forward of ``block``, whose arguments are whole.

    ``columns``: names of the children whose outputs are sharded; ``closed``: of children whose outputs are
    whole again; ``others``: of whole children and of parameters. What is not understood is neither whole nor
    reached.
    """

    def __init__(self, block: nn.Module, columns: set[str], closed: set[str], others: Collection[str]) -> None:
        self.block, self.columns, self.closed, self.others = block, columns, closed, set(others)
        self._inputs: dict[str, set[bool]] = defaultdict(set)
        """For each child that is called: whether its input is computed from sharded features."""
        self._lost: set[str] = set()
        """Those of ``others`` whose output meets sharded features, or that are not only called."""
        self._labels: dict[str, Labels] = defaultdict(Labels)
        definition = next(iter(getattr(tree_of(block.forward), "body", [])), None)
        nodes = list(ast.walk(definition)) if definition is not None else []
        stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self._locals = stored | {n.arg for n in nodes if isinstance(n, ast.arg)}  # others are modules: torch
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
                value = self._value(s.value)
                for target in s.targets if isinstance(s, ast.Assign) else [s.target]:
                    self._bind(target, value, certain and not isinstance(s, ast.AugAssign))
            elif isinstance(s, ast.FunctionDef | ast.ClassDef):
                self._lose(s)
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
        for node in ast.walk(target) if target is not None else ():
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
        own = self.others & self.block._parameters.keys()
        if isinstance(node, ast.Name):  # a function that is called with the block may read its parameters
            return Labels(own) if node.id == "self" else self._labels[node.id]
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
            self._lost |= {node.attr} & self.others - own
            return Labels({node.attr} & own)
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
            self._lose(tree_of(method) or node)
        elif not name:
            if isinstance(node.func, ast.Attribute):  # a method may put its arguments into its object
                self._bind(node.func.value, inputs, False)
            inputs |= self._value(node.func)
        return _NONE if getattr(node.func, "attr", "") in _FACTS else self._meet(inputs)
