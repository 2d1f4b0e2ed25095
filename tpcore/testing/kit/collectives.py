"""The conformance kit's checks of collectives: functions of (ctx, ...) that return messages about errors.

They return and do not raise, so that ranks stay in step and report all errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...comm import Comm, Op
from ...context import ParallelContext
from ...errors import BackendError
from ...transport import PRIMITIVES as PRIMITIVES_BY_NAME
from ...transport import TABLE, Primitive

SHAPES = ((4,), (4, 8), (8, 4, 4), (4, 1, 8, 4))
EMPTY = ((0, 4), (4, 0))


class Wrong(list[str]):
    """Messages about errors, and the largest ``error`` relative to the ``allowed`` one."""

    error = allowed = 0.0

    def measure(self, what: str, got: Tensor, want: Tensor, allowed: float = 0.0) -> None:
        """Compare by the largest difference; with ``allowed`` 0 the values must be equal."""
        got, want = (t.detach().cpu().double() for t in (got, want))
        alike = got.shape == want.shape
        error = float((got - want).abs().max()) if alike and got.numel() else (0.0 if alike else float("inf"))
        if not error <= allowed:  # nan too
            self.append(f"{what} is off by {error:.2e}, allowed {allowed:.0e}")
        if not error / max(allowed, 1e-300) < self.error / max(self.allowed, 1e-300):
            self.error, self.allowed = error, allowed


def values(shape: tuple[int, ...], position: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, which every dtype represents and sums exactly; different at each position."""
    n = torch.Size(shape).numel()
    whole = (torch.arange(n) * (position + 3) + position) % 7
    out = (whole % 2 if dtype is torch.bool else whole).to(dtype).view(shape)
    return out * (1 + 2j) if dtype.is_complex else out


Calls = list[tuple[str, Callable[[Tensor], Tensor], Tensor]]

# values to try for an argument of this name: (number of dims, group size) -> values
_TRIED: dict[str, Callable[[int, int], Sequence[Any]]] = {
    "dim": lambda ndim, n: range(-ndim, ndim),
    "src": lambda ndim, n: range(n),
    "op": lambda ndim, n: ["sum"],
    "donate": lambda ndim, n: [False],
    "split_dim": lambda ndim, n: range(-ndim, ndim),
    # the ring, the ring backwards, a swap of two members, one sender only, the identity
    "to": lambda ndim, n: [
        tuple((i + 1) % n for i in range(n)),
        tuple((i - 1) % n for i in range(n)),
        (n - 1, *range(1, n - 1), 0),
        (n - 1, *[None] * (n - 1)),
        tuple(range(n)),
    ],
}
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all_reduce max": ("all_reduce", {"op": "max"}),
    "all_reduce donate": ("all_reduce", {"donate": True}),
    "start_all_reduce": ("all_reduce", {}),
}
REDUCING = tuple(p.name for p in TABLE if p.sums)
MOVING = tuple(p.name for p in TABLE if not p.sums)
_AFTER = list(PRIMITIVES_BY_NAME).index("all_reduce") + 1
PRIMITIVES = (*list(PRIMITIVES_BY_NAME)[:_AFTER], *_VARIANTS, *list(PRIMITIVES_BY_NAME)[_AFTER:])
"""Primitives and variants, in the order in which the kit tests them."""


def _arguments(primitive: Primitive, shape: torch.Size, n: int) -> Iterator[dict[str, Any]]:
    """Arguments to try on a tensor of this shape in a group of ``n``."""
    ndim = len(shape)
    tried = [_TRIED[name](ndim, n) for name in primitive.arguments if name != "concat_dim"]
    for values in itertools.product(*tried):
        given = dict(zip([a for a in primitive.arguments if a != "concat_dim"], values, strict=True))
        if primitive.divides and shape[given[primitive.divides]] % n:
            continue
        if "split_dim" not in given:
            yield given
            continue
        for concat in {given["split_dim"], (given["split_dim"] + 1) % ndim}:
            yield given | {"concat_dim": concat}


def calls(comm: Comm, name: str, every: list[Tensor]) -> Calls:
    """(description, call, correct result) for each way to call ``name``, a primitive or a variant, on tensors
    like ``every``."""
    me, ndim = int(comm.position.cpu()), every[0].ndim
    of, fixed = _VARIANTS.get(name, (name, {}))
    primitive, out = PRIMITIVES_BY_NAME[of], []
    for given in _arguments(primitive, every[0].shape, comm.size):
        chosen = given | fixed
        # in the transport's form: dims are not negative, and a member that sends nothing has target -1
        plain = [_plain(k, v, ndim) for k, v in chosen.items()]
        want = primitive.meaning(every, me, *plain)
        how = " ".join(f"{k} {v}" for k, v in chosen.items() if k not in ("op", "donate"))
        out.append((how, _call(comm, name, of, chosen), want))
    return out


def _plain(name: str, value: Any, ndim: int) -> Any:
    if name.endswith("dim"):
        return value % ndim
    return tuple(-1 if t is None else t for t in value) if name == "to" else value


def _call(comm: Comm, name: str, of: str, given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    if name == "start_all_reduce":
        return lambda x: comm.start_all_reduce(x, **given)()
    return partial(getattr(comm, of), **given)


def differs(got: Tensor, want: Tensor) -> str:
    """A message if a result differs in value, dtype or shape; else empty."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    got, want = (t.detach().cpu().contiguous() for t in (got, want))
    if not torch.equal(got.view(-1).view(torch.uint8), want.view(-1).view(torch.uint8)):
        return f"is {got.flatten()[:8].tolist()}..., not {want.flatten()[:8].tolist()}..."
    return ""


def _each(ctx: ParallelContext, comm: Comm, primitive: str, every: list[Tensor]) -> Wrong:
    me, out = int(comm.position.cpu()), Wrong()
    for how, call, want in calls(comm, primitive, every):
        problem = differs(call(every[me].to(ctx.device, copy=True)), want)
        if problem:
            where = f"{primitive} {how} of {tuple(every[me].shape)} over {comm.group.axes} on rank {ctx.rank}"
            out.append(f"{where} {problem}")
    return out


def joined(ctx: ParallelContext) -> Wrong:
    """Position, size, device and process group are consistent."""
    out, comm = Wrong(), ctx.comm("tp")
    if comm.position.dtype != torch.int64 or comm.position.shape != (1,):
        out.append(
            f"comm.position is {comm.position.dtype} {tuple(comm.position.shape)}, not one int64 element"
        )
    elif int(comm.position.cpu()) != ctx.coord("tp"):
        out.append(f"comm.position is {int(comm.position.cpu())} on the rank at {ctx.coord('tp')}")
    if comm.position.device.type != ctx.device.type:
        out.append(f"comm.position is on {comm.position.device}, the backend's tensors on {ctx.device}")
    if comm.size != ctx.mesh.axes["tp"]:
        out.append(f"a tp group of size {comm.size}, not {ctx.mesh.axes['tp']}")
    if comm.process_group is None:
        out.append("process_group is None")
    return out


def right_values(ctx: ParallelContext, primitive: str, dtype: torch.dtype) -> Wrong:
    comm, out = ctx.comm("tp"), Wrong()
    for shape in SHAPES:
        out += _each(ctx, comm, primitive, [values(shape, p, dtype) for p in range(comm.size)])
    return out


def empty(ctx: ParallelContext, primitive: str) -> Wrong:
    comm, out = ctx.comm("tp"), Wrong()
    for shape in EMPTY:
        out += _each(ctx, comm, primitive, [values(shape, p, torch.float32) for p in range(comm.size)])
    return out


def strided(ctx: ParallelContext, primitive: str) -> Wrong:
    """The input is transposed and has gaps between its elements."""
    comm, out = ctx.comm("tp"), Wrong()
    me = int(comm.position.cpu())
    every = [values((4, 8, 4), p, torch.float32).transpose(0, 2)[:, ::2] for p in range(comm.size)]
    for how, call, want in calls(comm, primitive, every):
        whole = values((4, 8, 4), me, torch.float32).to(ctx.device)
        problem = differs(call(whole.transpose(0, 2)[:, ::2]), want.contiguous())
        if problem:
            out.append(f"{primitive} {how} of a strided tensor on rank {ctx.rank} {problem}")
        between = values((4, 8, 4), me, torch.float32).transpose(0, 2)[:, 1::2]
        if differs(whole.transpose(0, 2)[:, 1::2], between):
            out.append(f"{primitive} {how} wrote between the elements of its input on rank {ctx.rank}")
    return out


def memory(ctx: ParallelContext, primitive: str) -> Wrong:
    """Inputs stay unchanged. Outputs are contiguous, new memory, outside of autograd, and stay valid."""
    comm, out = ctx.comm("tp"), Wrong()
    me = int(comm.position.cpu())
    every = [values((4, 8, 4), p, torch.float32) for p in range(comm.size)]
    kept: list[tuple[str, Tensor, Tensor]] = []
    for how, call, want in calls(comm, primitive, every):
        x = every[me].to(ctx.device, copy=True).requires_grad_("donate" not in primitive)
        y = call(x)
        what = f"{primitive} {how} on rank {ctx.rank}:"
        if not y.is_contiguous():
            out.append(f"{what} the output is not contiguous, its strides are {y.stride()}")
        if "donate" not in primitive and differs(x, every[me]):
            out.append(f"{what} the input was changed")
        if "donate" not in primitive and y.numel() and y.data_ptr() == x.data_ptr() != 0:  # 0: lazy
            out.append(f"{what} the output is the input's memory")
        if y.requires_grad:
            out.append(f"{what} the output is part of an autograd graph, whose gradient would be wrong")
        kept.append((what, y, want))
    for what, y, want in kept:  # after all calls: a reused buffer would have later values by now
        problem = differs(y, want)
        if problem:
            out.append(f"{what} after later collectives the output {problem}")
    return out


def overlapped(ctx: ParallelContext) -> Wrong:
    """Several all-reduces under way, waited for in another order, with a gather in between."""
    comm, out = ctx.comm("tp"), Wrong()
    n, me = comm.size, comm.position.float()  # a tensor: one program for all ranks of a compiling backend
    waits = [comm.start_all_reduce(me.repeat(9) + i) for i in range(4)]
    gathered = comm.all_gather(me, 0)
    for i, wait in reversed(list(enumerate(waits))):
        problem = differs(wait(), torch.full((9,), float(n * i + n * (n - 1) // 2)))
        if problem:
            out.append(f"all-reduce {i} of 4 under way {problem}")
    if differs(gathered, torch.arange(n).float()):
        out.append("a gather between the start of an all-reduce and its wait is wrong")
    return out


def groups(ctx: ParallelContext, primitive: str) -> Wrong:
    """Collectives over each axis, a pair of axes and the world involve only the group's members."""
    axes, out = list(ctx.mesh.axes), Wrong()
    for names in [(a,) for a in axes] + [tuple(axes[:2]), tuple(axes)]:
        comm = ctx.comm(*names)
        if comm.size == 1:
            continue
        members = ctx.mesh.group(*names).members(ctx.rank)
        if members[int(comm.position.cpu())] != ctx.rank:
            out.append(f"rank {ctx.rank} is at {int(comm.position.cpu())} of {names} group {members}")
        out += _each(ctx, comm, primitive, [values((4, 4), r, torch.float32) for r in members])
    return out


def many(ctx: ParallelContext) -> Wrong:
    """A long run of collectives of changing kind and size: none affects another."""
    comm, out = ctx.comm("tp"), Wrong()
    for i in range(24):
        every = [values((4, 4 + i % 5), p + i, torch.float32) for p in range(comm.size)]
        out += _each(ctx, comm, PRIMITIVES[i % len(PRIMITIVES)], every)
    return out


def replicated(ctx: ParallelContext) -> Wrong:
    """A sum that rounds has the same bits on every rank: otherwise ranks would drift apart."""
    comm = ctx.comm("tp")
    x = torch.rand(257, generator=torch.Generator().manual_seed(ctx.rank)).to(ctx.device)
    ops_: tuple[Op, ...] = ("sum", "max")
    for op in ops_:
        y = comm.all_reduce(x, op)
        seen = comm.all_gather(y.unsqueeze(0), 0).cpu()
        if not all(torch.equal(row, seen[0]) for row in seen):
            return Wrong([f"all_reduce {op} differs between ranks in its last bits"])
    return Wrong()


def not_refused(call: Callable[[], None], what: str) -> list[str]:
    try:
        call()
    except BackendError:
        return []
    return [f"{what} was not refused"]
