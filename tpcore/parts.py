"""A part of an activation, in runs with checks: each operation that takes it for the whole is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

_CONTRACTIONS = frozenset(
    [
        "linear",
        "matmul",
        "__matmul__",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "einsum",
        "scaled_dot_product_attention",
        "conv1d",
        "sum",
        "mean",
    ]
)
_REARRANGEMENTS = frozenset(
    [
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "transpose",
        "swapaxes",
        "swapdims",
        "permute",
        "movedim",
        "moveaxis",
        "t",
        "squeeze",
        "unsqueeze",
        "expand",
    ]
)
_SPLITTING = frozenset(("view", "reshape", "unflatten"))
_OVER_LAST = frozenset(("layer_norm", "rms_norm"))
_OVER_DIM = frozenset(("softmax", "log_softmax", "logsumexp", "argmax", "normalize"))
_OVER_CLASSES = frozenset(("cross_entropy", "nll_loss"))


@dataclass(frozen=True)
class Mark:
    """The ``width`` entries along ``dim`` are this rank's part of the features or of the tokens."""

    kind: str
    dim: int
    width: int
    ranks: int
    report: Callable[[str], None]


class PartOf(Tensor):
    """This rank's part of an activation, in a run with checks: every operation on it is inspected.

    The result of an operation is a part too, if the cut dim can be found in the result: exactly for views and
    operations that keep the shape, for others if one dim alone has its size.
    """

    mark: Mark

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((*args, *kwargs.values())))
        mark = next(t.mark for t in given if isinstance(t, PartOf))
        name = getattr(func, "__name__", "")
        problem = _problem(name, mark, given, args, kwargs)
        if problem:
            mark.report(problem)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            if name in _CONTRACTIONS:
                return out
            if name in _REARRANGEMENTS and args and isinstance(args[0], PartOf):
                return _rearranged(out, args[0], name, lambda x: func(x, *args[1:], **kwargs))
            return _propagated(out, mark, next(t.shape for t in given if isinstance(t, PartOf)))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _rearranged(out: Tensor, x: PartOf, name: str, how: Callable[[Tensor], Tensor]) -> Tensor:
    """``out``, marked where ``how`` puts the cut dim of ``x``: it follows from the strides of a view."""
    mark = x.mark
    if mark.width == 1:  # any dim of one entry has any stride
        found: Tensor = _propagated(out, mark, x.shape)
        return found
    like = how(torch.empty(x.shape, device="meta"))
    # the dim whose steps lead from this rank's part to the next rank's
    edge = math.prod(x.shape[mark.dim :])
    sizes = enumerate(zip(like.shape, like.stride(), strict=True))
    dim = next((i for i, (n, step) in sizes if n > 1 and step < edge <= step * n), None)
    if dim is None:
        return out
    split = name in _SPLITTING and out.ndim > x.ndim and dim > 0
    if split and out.shape[dim - 1] == 1 and out.shape[dim] == mark.width:
        return out  # view(..., 1, head_dim): heads are cut, of which each rank has one, and head_dim is whole
    return marked(out, replace(mark, dim=dim, width=out.shape[dim]))


def _propagated(out: Any, mark: Mark, shape: Sequence[int]) -> Any:
    """``out`` with the mark of an operand of this ``shape``, if the cut dim can be found in it."""
    if isinstance(out, (list, tuple)) and type(out) in (list, tuple):
        return type(out)(_propagated(one, mark, shape) for one in out)
    if not isinstance(out, Tensor) or isinstance(out, PartOf) or not out.is_floating_point():
        return out
    places = [dim for dim, size in enumerate(out.shape) if size == mark.width]
    dim = mark.dim + max(0, out.ndim - len(shape))  # broadcasting adds dims in front
    if dim not in places and len(places) != 1:
        return out
    return marked(out, replace(mark, dim=dim if dim in places else places[0]))


def marked(t: Tensor, mark: Mark) -> PartOf:
    part = t.as_subclass(PartOf)
    part.mark = mark
    return part


def _problem(
    name: str, mark: Mark, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """What is wrong with a call of the function ``name`` on a part; None if nothing is."""
    have = f"{mark.width} of {mark.width * mark.ranks} {mark.kind}"
    if mark.kind == "tokens":
        whole = [t for t in given if isinstance(t, nn.Parameter) and t.requires_grad]
        if whole and torch.is_grad_enabled() and not getattr(whole[0], "sequence_parallel_enabled", False):
            return (
                f"{name} with a parameter of shape {tuple(whole[0].shape)} sees {have}, and so would its "
                "gradient: in a sequence-parallel region use tpcore.RMSNorm or tpcore.LayerNorm with "
                "sequence_parallel_enabled=True, or tpcore.ops.copy(parameter, comm) in a layer of your own"
            )
        return None
    if mark.dim not in _reduced(name, args, kwargs):
        return None
    remedy = (
        "use tpcore.parallel_cross_entropy"
        if name in _OVER_CLASSES or name == "log_softmax"
        else "gather them first (gather_output=True, or tpcore.ops.gather)"
    )
    return f"{name} sees only {have}, different ones on each rank: {remedy}"


def _reduced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> range | tuple[int, ...]:
    """The dims that the function ``name`` reduces or normalizes over."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor):
        return ()
    if name in _OVER_CLASSES:
        return (min(1, x.ndim - 1),)
    if name in _OVER_LAST:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return range(x.ndim - len(shape), x.ndim)
    if name in _OVER_DIM:
        dim = kwargs.get("dim", args[1] if len(args) > 1 and name != "normalize" else None)
        dim = 1 if dim is None and name == "normalize" else dim
        return (dim % x.ndim,) if isinstance(dim, int) else ()
    return ()


def plain(t: Tensor) -> Tensor:
    """``t`` without its mark, for layers that handle parts correctly."""
    # by type: isinstance asks the metaclass, which takes five times as long
    return t.as_subclass(Tensor) if type(t) is PartOf else t
