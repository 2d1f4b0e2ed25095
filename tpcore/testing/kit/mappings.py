"""The conformance kit's checks of gradients: backward is the transpose of forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...comm import mappings as ops
from ...comm.comm import Comm
from ...comm.transport import PRIMITIVES
from ...runtime.context import ParallelContext
from .collectives import Wrong

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
    me = int(comm.position.cpu())

    def some(shape: torch.Size, kind: str, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + (me + 1) * 100 * (kind == "parts"))
        return torch.randint(-8, 9, shape, generator=generator).float().to(ctx.device)

    def inner(a: Tensor, b: Tensor, kind: str) -> float:
        everywhere = comm.all_gather((a * b).sum().reshape(1), 0)
        mine = everywhere.index_select(0, comm.position)
        return float(mine if kind == "replicated" else everywhere.sum())

    x = some(torch.Size((4, 8)), source, 1).requires_grad_()
    out = fn(x, comm)
    y = some(out.shape, target, 2)
    out.backward(y)
    if x.grad is None:
        return Wrong([f"{name}: no gradient"])
    left, right = inner(out.detach(), y, target), inner(x.detach(), x.grad, source)
    return Wrong([] if left == right else [f"{name}: <f(x), y> is {left} and <x, f_T(y)> is {right}"])


def primitive_law(ctx: ParallelContext, name: str) -> Wrong:
    """The same law for a primitive and its ``transpose`` in the table, over all ranks' tensors."""
    comm, primitive = ctx.comm("tp"), PRIMITIVES[name]
    me, n = int(comm.position.cpu()), comm.size
    given = {"dim": 1, "src": n - 1, "op": "sum", "donate": False, "split_dim": 1, "concat_dim": 0}
    given["to"] = (n - 1, *[-1] * (n - 1))
    arguments = [given[a] for a in primitive.arguments]

    def some(shape: torch.Size, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + 100 * me)
        return torch.randint(-8, 9, shape, generator=generator).float().to(ctx.device)

    def inner(a: Tensor, b: Tensor) -> float:
        return float(comm.all_reduce((a * b).sum().reshape(1)))

    x = some(torch.Size((4, 8)), 1)
    out = getattr(comm, name)(x, **dict(zip(primitive.arguments, arguments, strict=True)))
    y = some(out.shape, 2)
    left, right = inner(out, y), inner(x, primitive.transpose(comm, y, *arguments))
    return Wrong([] if left == right else [f"{name}: <f(x), y> is {left} and <x, f_T(y)> is {right}"])
