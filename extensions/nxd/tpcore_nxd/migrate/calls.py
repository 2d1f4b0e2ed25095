"""Calls of torch_xla that have a counterpart, rewritten: another callee, and arguments that it takes."""

from __future__ import annotations

import ast

from .names import Counterpart

Edit = tuple[int, int, int, int, str]
"""First line and byte, last line and byte of a part of the script, and other text for it."""


def rewritten_call(call: ast.Call, to: Counterpart) -> list[Edit] | None:
    """The edits; None where ``to`` says nothing of a call with these arguments."""
    if not to.rewrite or not to.new:
        return None
    whole, callee = _place(call), _place(call.func)
    name = to.new.partition("(")[0]
    if to.rewrite == "*":
        return [(*callee, name)]
    stay, *dropped = to.rewrite.split()
    values = {k.arg: ast.unparse(k.value) for k in call.keywords}
    known = {word.removeprefix("-").partition("=")[0]: word.partition("=")[2] for word in dropped}
    needed = {key: value for key, value in known.items() if value}
    fits = values.keys() <= known.keys() and needed == {key: values.get(key) for key in needed}
    if not fits or len(call.args) != int(stay) or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    if not call.args:
        return [(*whole, to.new)]
    last = _place(call.args[-1])
    return [(*callee, name), (*last[2:], whole[2], whole[3] - 1, "")] if call.keywords else [(*callee, name)]


def _place(node: ast.expr) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0
