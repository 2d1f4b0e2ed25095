"""The conformance kit's checks of gradients: backward is the transpose of forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...comm import mappings as ops
from ...comm.comm import Comm
from ...comm.transport import PRIMITIVES
from ...runtime.context import ParallelContext
from .collectives import Wrong, shapes

MAPPINGS: dict[str, tuple[Callable[[Tensor, Comm], Tensor], str, str]] = {
    "copy": (ops.copy, "replicated", "parts"),
    "reduce": (ops.reduce, "parts", "replicated"),
    "scatter": (lambda x, c: ops.scatter(x, c, 1), "replicated", "parts"),
    "gather": (lambda x, c: ops.gather(x, c, 1), "parts", "replicated"),
    "all_gather": (lambda x, c: ops.all_gather(x, c, 1), "parts", "parts"),
    "reduce_scatter": (lambda x, c: ops.reduce_scatter(x, c, 1), "parts", "parts"),
    "all_to_all": (lambda x, c: ops.all_to_all(x, c, 1, 0), "parts", "parts"),
    "shift": (ops.shift, "parts", "parts"),
}


def transpose_law(ctx: ParallelContext, name: str) -> Wrong:
    """<f(x), y> == <x, f_T(y)>, with replicated values counted once; exact, in whole numbers."""
    comm = ctx.comm("tp")
    fn, source, target = MAPPINGS[name]

    def some(shape: Sequence[int], kind: str, seed: int) -> Tensor:
        return _whole_numbers(ctx, shape, seed + (int(comm.position.cpu()) + 1) * 100 * (kind == "parts"))

    def inner(a: Tensor, b: Tensor, kind: str) -> float:
        everywhere = comm.all_gather((a * b).sum().reshape(1), 0)
        mine = everywhere.index_select(0, comm.position)
        return float(mine if kind == "replicated" else everywhere.sum())

    x = some(shapes(comm.size)[1], source, 1).requires_grad_()
    out = fn(x, comm)
    y = some(out.shape, target, 2)
    out.backward(y)
    if x.grad is None:
        return Wrong([f"{name}: no gradient"])
    return _equal(name, inner(out.detach(), y, target), inner(x.detach(), x.grad, source))


def primitive_law(ctx: ParallelContext, name: str) -> Wrong:
    """The same law for a primitive and its ``transpose`` in the table, over all ranks' tensors."""
    comm, primitive = ctx.comm("tp"), PRIMITIVES[name]
    me, n = int(comm.position.cpu()), comm.size
    values = {"dim": 1, "src": n - 1, "op": "sum", "donate": False, "split_dim": 1, "concat_dim": 0}
    values["to"] = (n - 1, *[-1] * (n - 1))
    arguments = {name: values[name] for name in primitive.arguments}

    def inner(a: Tensor, b: Tensor) -> float:
        return float(comm.all_reduce((a * b).sum().reshape(1)))

    x = _whole_numbers(ctx, shapes(n)[1], 1 + 100 * me)
    out = getattr(comm, name)(x, **arguments)
    y = _whole_numbers(ctx, out.shape, 2 + 100 * me)
    return _equal(name, inner(out, y), inner(x, primitive.transpose(comm, y, *arguments.values())))


def _whole_numbers(ctx: ParallelContext, shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, tuple(shape), generator=generator).float().to(ctx.device)


def _equal(name: str, left: float, right: float) -> Wrong:
    return Wrong([] if left == right else [f"{name}: <f(x), y> is {left} and <x, f_T(y)> is {right}"])
