"""This rank's expected part of a full tensor, and tensors with difficult memory layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...layout.shard import ShardSpec
from ...runtime.context import ParallelContext
from .cases import Case
from .compare import Findings

GARBAGE = 7.0  # the value in padding, which must not count


def chunk(x: Tensor, dim: int | None, ctx: ParallelContext) -> Tensor:
    """This rank's tokens; all of them without sequence parallelism."""
    return x if dim is None else x.chunk(ctx.comm("tp").size, dim)[ctx.coord("tp")]


def scrambled(x: Tensor, wanted: bool) -> Tensor:
    """The same values in a memory order that no ``view`` can flatten."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if wanted else x


def leaf(x: Tensor, case: Case, ctx: ParallelContext) -> Tensor:
    return scrambled(x.detach().to(ctx.device), case.scrambled).requires_grad_()


def grad_of(x: Tensor) -> Tensor:
    if x.grad is None:
        raise RuntimeError("the plain module has given no gradient")
    return x.grad


def features(spec_size: int, stride: int) -> ShardSpec:
    return ShardSpec.strided((spec_size,), 0, stride)


def cut_features(x: Tensor, spec: ShardSpec, ctx: ParallelContext, padding: float = 0.0) -> Tensor:
    """This rank's part of the last dim, cut by ``spec``, which is for that dim alone."""
    n, r = ctx.comm("tp").size, ctx.coord("tp")
    whole = ShardSpec(tuple(x.shape), x.ndim - 1, spec.blocks)
    return whole.shard(x, r, n).masked_fill(spec.source_index(n)[r] < 0, padding)


def shard_of(module: Any, name: str, full: Tensor, ctx: ParallelContext) -> Tensor:
    shard: Tensor = module.shard_specs[name].shard(full, ctx.coord("tp"), ctx.comm("tp").size)
    return shard


def compare_gradients(
    layer: Any,
    exact: nn.Module,
    sizes: nn.Module,
    terms: int,
    roundings: Callable[[str], int],
    ctx: ParallelContext,
    found: Findings,
    label: str = "",
) -> None:
    """Of the parameters of ``layer``, with those of a reference and of its magnitudes."""
    for name, p in exact.named_parameters():
        bound = found.bound(grad_of(sizes.get_parameter(name)), terms, roundings(name))
        want, allowed = (shard_of(layer, name, t, ctx) for t in (grad_of(p), bound))
        found.close(f"{label}{name} grad", layer.get_parameter(name).grad, want, allowed)


def compare_initial(layer: Any, plain: nn.Module, ctx: ParallelContext, found: Findings) -> None:
    for name, p in plain.named_parameters():
        found.same(f"initial {name}", getattr(layer, name).detach(), shard_of(layer, name, p.detach(), ctx))
    keys, plain_keys = list(layer.state_dict()), list(plain.state_dict())
    found.expect(keys == plain_keys, f"state_dict has {keys}, the plain module {plain_keys}")


def sequence(case: Case) -> dict[str, Any]:
    return {} if case.seq is None else {"sequence_dim": case.seq}
