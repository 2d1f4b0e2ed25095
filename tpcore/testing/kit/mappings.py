"""The conformance kit's checks of gradients: backward is the transpose of forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ...comm import mappings as ops
from ...comm.comm import Comm
from ...comm.transport import PRIMITIVES
from .collectives import Trial, check, shapes

Kind = Literal["replicated", "parts"]
MAPPINGS: dict[str, tuple[Callable[[Tensor, Comm], Tensor], Kind, Kind]] = {
    "copy": (ops.copy, "replicated", "parts"),
    "reduce": (ops.reduce, "parts", "replicated"),
    "scatter": (lambda x, c: ops.scatter(x, c, 1), "replicated", "parts"),
    "gather": (lambda x, c: ops.gather(x, c, 1), "parts", "replicated"),
    "all_gather": (lambda x, c: ops.all_gather(x, c, 1), "parts", "parts"),
    "reduce_scatter": (lambda x, c: ops.reduce_scatter(x, c, 1), "parts", "parts"),
    "all_to_all": (lambda x, c: ops.all_to_all(x, c, 1, 0), "parts", "parts"),
    "shift": (ops.shift, "parts", "parts"),
}


@check
def transpose_law(t: Trial, name: str) -> None:
    """A failure here alone is in collectives made during backward: <f(x), y> == <x, f_T(y)>, replicated values once."""
    fn, source, target = MAPPINGS[name]
    x = _whole_numbers(t, shapes(t.size)[1], 1, source).requires_grad_()
    out = fn(x, t.comm)
    y = _whole_numbers(t, out.shape, 2, target)
    out.backward(y)
    if x.grad is None:
        t.found.append(f"{name}: no gradient")
        return
    _equal(t, name, _inner(t, out.detach(), y, target), _inner(t, x.detach(), x.grad, source))


@check
def primitive_law(t: Trial, name: str) -> None:
    """A failure here alone is in state that a primitive leaves for its transpose: <f(x), y> == <x, f_T(y)>."""
    primitive, n = PRIMITIVES[name], t.size
    values = {"dim": 1, "src": n - 1, "op": "sum", "donate": False, "split_dim": 1, "concat_dim": 0}
    values["to"] = (n - 1, *[-1] * (n - 1))
    arguments = {name: values[name] for name in primitive.arguments}
    x = _whole_numbers(t, shapes(n)[1], 1)
    out = getattr(t.comm, name)(x, **arguments)
    y = _whole_numbers(t, out.shape, 2)
    _equal(t, name, _inner(t, out, y), _inner(t, x, primitive.transpose(t.comm, y, *arguments.values())))


def _whole_numbers(t: Trial, shape: Sequence[int], seed: int, kind: Kind = "parts") -> Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * (t.me + 1) * (kind == "parts"))
    return torch.randint(-8, 9, tuple(shape), generator=generator).float().to(t.ctx.device)


def _inner(t: Trial, a: Tensor, b: Tensor, kind: Kind = "parts") -> float:
    mine = (a * b).sum().reshape(1)
    return float(mine if kind == "replicated" else t.comm.all_reduce(mine))


def _equal(t: Trial, name: str, left: float, right: float) -> None:
    t.expect(left == right, f"{name}: <f(x), y> is {left} and <x, f_T(y)> is {right}")
