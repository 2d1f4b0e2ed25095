"""Products of the heads that a rank has, which have the same bits whatever their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpcore import nested
from tpcore.layers.blocks import ALIGNED, products

from ..plan import rules as plan
from ..plan.decisions import LINEAR, Cut
from ..plan.rules import wildcard
from .forwards import columns_by_owner, own_forward, with_forward

_OF_TWO = frozenset({torch.matmul, torch.linalg.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm})
_OF_OTHERS = frozenset({torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_, torch.einsum})


class _EachAlone(TorchFunctionMode):
    """Multiplies batches of matrices one by one: that of one head may have another layout in memory than those of
    several, and a library of matrices chooses its order of addition by it. ValueError for functions that have no such
    form."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        given = [*nested.tensors((args, kwargs))] if func in _OF_TWO | _OF_OTHERS else []
        if sum(t.ndim > 2 for t in given) < 2:  # or of one matrix, which every rank has
            return func(*args, **kwargs)
        if func is torch.einsum and (made := _einsum(args[0], given)) is not None:
            return made
        if func in _OF_OTHERS:
            shapes = ", ".join(str(tuple(t.shape)) for t in given)
            raise ValueError(
                f"torch.{func.__name__} of tensors of shapes {shapes} between sharded layers adds in an order of what "
                "a rank has of them: with reproducible= call torch.matmul on batches of matrices, or leave the module "
                "whole, plan={...: 'replicate'}"
            )
        x, y = (*args, *(kwargs[key] for key in ("input", "other", "mat2") if key in kwargs))[:2]
        out, made = kwargs.get("out"), products(x, y)
        return made if out is None else out.resize_(made.shape).copy_(made)


def _einsum(equation: Any, given: list[Tensor]) -> Tensor | None:
    """Of two batches of matrices; None of anything else, in which heads may be what is added or multiplied together."""
    sides, _, out = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    left, _, right = sides.partition(",")
    batch = [c for c in out if c in left and c in right]
    row, inner, column = ({*left} - {*right}, {*left} & {*right} - {*out}, {*right} - {*left})
    once = all(len({*side}) == len(side) for side in (left, right, out))
    if not (batch and once and len(row) == len(inner) == len(column) == 1 and {*out} == {*batch} | row | column):
        return None
    x = given[0].permute([left.index(c) for c in (*batch, *row, *inner)])
    y = given[1].permute([right.index(c) for c in (*batch, *inner, *column)])
    return products(x, y).permute([[*batch, *row, *column].index(c) for c in out])


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, scale: float | None = None, **kwargs: Any
) -> Tensor:
    """Of heads padded to whole cache lines, so that each begins with one, however many there are."""
    size, width = query.shape[-1], value.shape[-1]
    line = ALIGNED // query.itemsize
    line *= -(-max(size, width) // line)
    query, key, value = (F.pad(t, (0, line - t.shape[-1])) for t in (query, key, value))
    kwargs["scale"] = size**-0.5 if scale is None else scale
    return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)[..., :width]


def multiply_each_alone(model: nn.Module, cuts: list[Cut]) -> None:
    """Let the modules that call column layers multiply what these return, such as queries and keys, head by head."""
    for name in columns_by_owner(model, cuts):
        module = model.get_submodule(name)
        original, own = own_forward(module)

        def forward(self: nn.Module, *args: Any, own: Callable[..., Any] = own, **kwargs: Any) -> Any:
            with _EachAlone():
                return own(self, *args, **kwargs)

        module.__class__ = with_forward(original, forward)


_IN_BLOCKS = LINEAR | {plan.EMBEDDING_ROW, plan.EMBEDDING_COLUMN, plan.SUMMED, plan.EXPERTS, plan.PARTIAL}


def check_in_blocks(cuts: list[Cut], most: int, capacity_factor: float | None) -> None:
    """One ValueError names all modules whose sums over ranks are not computed in ``most`` blocks."""
    if capacity_factor is not None:
        raise ValueError(
            f"capacity_factor={capacity_factor} drops choices by rank: leave it out, or reproducible={most}"
        )
    wrong = {wildcard(cut.name): cut.style for cut in cuts if cut.style not in _IN_BLOCKS}
    if wrong:
        named = ", ".join(f"{name} ({style!r})" for name, style in wrong.items())
        raise ValueError(
            f"reproducible={most}: {named} add what a rank has in an order of its degree: leave that whole, "
            f"plan={{{wildcard(next(iter(wrong)).rpartition('.')[0])!r}: 'replicate'}}, or reproducible out"
        )
