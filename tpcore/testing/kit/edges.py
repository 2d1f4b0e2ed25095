"""The conformance kit's checks of edge cases: large and odd tensors, odd values, repeated calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ...comm import Comm
from ...context import ParallelContext
from ...transport import PRIMITIVES
from .collectives import Wrong, calls, differs, values

LARGE = (4_097, (1 << 16) // 4 + 3, 1 << 22)
"""Numbers of float32 elements: a little more than 16 and 64 KiB; and 16 MB, more than a network buffers, so
that ranks that all send before they receive wait for ever. The last is for groups of two, where it is fast"""

Made = Callable[[int], Tensor]


def _only(
    ctx: ParallelContext, comm: Comm, name: str, made: Made, note: str, count: int | None = None
) -> Wrong:
    """Check the first ``count`` calls of one primitive on the tensors that ``made`` returns by position."""
    me, out = int(comm.position.cpu()), Wrong()
    every = [made(p) for p in range(comm.size)]
    for how, call, want in calls(comm, name, every)[:count]:
        problem = differs(call(made(me).to(ctx.device)), want.contiguous())
        if problem:
            out.append(f"{name} {how} of {note} on rank {ctx.rank} {problem}")
    return out


def large(ctx: ParallelContext, primitive: str, sizes: Sequence[int]) -> Wrong:
    """Every byte arrives, and inputs stay unchanged, whatever the size."""
    comm, out = ctx.comm("tp"), Wrong()
    me = int(comm.position.cpu())
    for n in [n for n in sizes if comm.size == 2 or n < LARGE[-1]]:
        n += -n % comm.size  # noqa: PLW2901  divisible by the number of ranks
        every = [torch.full((n,), p + 1.0) for p in range(comm.size)]
        for p, t in enumerate(every):
            t[: 1 << 15] = values((min(n, 1 << 15),), p, torch.float32)
            t[-1] = p + 9.0
        for how, call, want in calls(comm, primitive, every)[:1]:
            x = every[me].to(ctx.device, copy=True)
            problem = differs(call(x), want)
            if problem:
                out.append(f"{primitive} {how} of {n} elements on rank {ctx.rank} {problem}")
            if "donate" not in primitive and differs(x, every[me]):
                out.append(f"{primitive} {how} of {n} elements changed its input on rank {ctx.rank}")
    return out


def without_dims(ctx: ParallelContext, primitive: str) -> Wrong:
    """Tensors without dims keep their shape, in primitives that take them."""
    known = PRIMITIVES.get(primitive)
    if known is not None and {"dim", "split_dim"} & known.arguments.keys():
        return Wrong()
    return _only(ctx, ctx.comm("tp"), primitive, lambda p: torch.tensor(p - 3.5), "a tensor of no dims")


def odd_values(ctx: ParallelContext, primitive: str, loses: Sequence[str] = ()) -> Wrong:
    """NaN and infinity arrive, a maximum with NaN is NaN, and all numbers may be negative. Moved values keep
    their bits, also of NaN and zero. Except what the backend ``loses``."""
    comm, nan, inf = ctx.comm("tp"), float("nan"), float("inf")
    n, zero = comm.size, 0.0 if "the sign of zero" in loses else -0.0

    def negative(p: int) -> Tensor:
        return -1.0 - values((4, 4), p, torch.float32)

    def odd(p: int) -> Tensor:
        one = [nan, -inf, inf, zero] if p == n - 1 else [1.0, -2.0, 3.0, zero]
        return torch.tensor(one).repeat(4, 1)

    out = _only(ctx, comm, primitive, negative, "negative numbers")
    if "reduce" not in primitive:
        out += _only(ctx, comm, primitive, odd, "numbers that are not finite")
        return out
    if primitive == "all_reduce max" and "NaN in a maximum" in loses:
        return out
    me = int(comm.position.cpu())
    for how, call, want in calls(comm, primitive, [odd(p) for p in range(n)]):
        got = call(odd(me).to(ctx.device)).cpu()
        if not torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)):  # a computed NaN may have any bits
            out.append(f"{primitive} {how} of NaN and infinity on rank {ctx.rank} is {got[0].tolist()}")
    return out


def odd_memory(ctx: ParallelContext, primitive: str) -> Wrong:
    """Inputs with a storage offset, and inputs with strides of 0."""
    comm = ctx.comm("tp")

    def inside(p: int) -> Tensor:
        return values((5, 4), p, torch.float32)[1:]

    def repeated(p: int) -> Tensor:
        return values((1, 4), p, torch.float32).expand(4, 4)

    def on_device(made: Made) -> Made:  # a copy to a device must not lose the strides
        return lambda p: made(p) if ctx.device.type == "cpu" else made(p).to(ctx.device)

    out = _only(ctx, comm, primitive, on_device(inside), "a slice")
    if primitive != "all_reduce donate":  # memory with repeated elements cannot be donated
        out += _only(ctx, comm, primitive, on_device(repeated), "a tensor with strides of 0")
    return out


def again(ctx: ParallelContext, primitive: str) -> Wrong:
    """Calls of one shape with other values, and of one size with other shapes and dtypes. All results stay
    valid."""
    comm, out = ctx.comm("tp"), Wrong()
    me, kept = int(comm.position.cpu()), []
    kinds = [((4, 4), torch.float32), ((4, 4), torch.int64), ((4, 8), torch.float32), ((8, 4), torch.float32)]
    for turn in range(2):
        for shape, dtype in kinds:
            if dtype not in ctx.backend.capabilities.dtypes:
                continue
            every = [values(shape, p + 5 * turn, dtype) for p in range(comm.size)]
            for how, call, want in calls(comm, primitive, every)[:2]:
                kept.append((f"{how} of {dtype} {shape}", call(every[me].to(ctx.device, copy=True)), want))
    for what, got, want in kept:
        problem = differs(got, want)
        if problem:
            out.append(f"{primitive} {what} after calls like it on rank {ctx.rank} {problem}")
    return out


def any_mode(ctx: ParallelContext, primitive: str) -> Wrong:
    """A call that was first made under inference_mode works outside of it, and the reverse."""
    comm, out = ctx.comm("tp"), Wrong()
    me = int(comm.position.cpu())
    for inside, width in ((True, 12), (False, 12), (True, 12), (False, 20), (True, 20)):
        every = [values((4, width), p, torch.float32) for p in range(comm.size)]
        for how, call, want in calls(comm, primitive, every)[:2]:
            with torch.inference_mode(inside):
                got = call(every[me].to(ctx.device, copy=True))
            problem = differs(got, want)
            if not inside:
                got += 1  # an inference tensor could not be changed here
            if problem:
                out.append(f"{primitive} {how}, inference_mode({inside}), on rank {ctx.rank} {problem}")
    return out


def precise(ctx: ParallelContext, dtype: torch.dtype) -> Wrong:
    """A sum rounds at most once for each addend, in its own dtype. Maxima and sums of integers are exact. The
    same call gives the same bits."""
    comm, out = ctx.comm("tp"), Wrong()
    me = int(comm.position.cpu())

    def some(p: int) -> Tensor:
        g = torch.Generator().manual_seed(p)
        if dtype.is_floating_point:
            return torch.randn(1024, generator=g, dtype=torch.float64).to(dtype)
        top = torch.iinfo(dtype).max // (comm.size + 1)
        return torch.randint(top - min(top, 1000), top, (1024,), generator=g, dtype=torch.int64).to(dtype)

    every = [some(p) for p in range(comm.size)]
    x, wide = every[me].to(ctx.device), torch.stack(every)
    first, second = (comm.all_reduce(x).cpu() for _ in range(2))
    if differs(second, first):
        out.append(f"the sum of {dtype} has other bits the second time on rank {ctx.rank}")
    if dtype.is_floating_point:
        exact, size = wide.double().sum(0), wide.double().abs().sum(0)
        far = (first.double() - exact).abs() - size * (comm.size * torch.finfo(dtype).eps / 2)
        if not bool((far <= 0).all()):
            out.append(f"the sum of {dtype} is off by {float(far.max()):.1e} more than its roundings allow")
    elif differs(first, wide.sum(0, dtype=dtype)):
        out.append(f"the sum of large {dtype} {differs(first, wide.sum(0, dtype=dtype))}")
    if problem := differs(comm.all_reduce(x, "max").cpu(), wide.amax(0)):
        out.append(f"the maximum of {dtype} on rank {ctx.rank} {problem}")
    return out


def started(ctx: ParallelContext) -> Wrong:
    """A reduction reads its input when it is started: the caller may change it before the wait."""
    comm, out = ctx.comm("tp"), Wrong()
    me = comm.position.float()
    for n in (8, 100_000):
        x = me.repeat(n) + 1
        wait = comm.start_all_reduce(x)
        x.zero_()
        want = torch.full((n,), comm.size * (comm.size + 1) / 2)
        first, second = wait(), wait()
        if differs(first, want):
            out.append(
                f"start_all_reduce of {n} elements whose input changes meanwhile {differs(first, want)}"
            )
        if differs(second, want):
            out.append(f"a second wait for start_all_reduce of {n} elements {differs(second, want)}")
    return out


def interleaved(ctx: ParallelContext) -> Wrong:
    """Groups do not affect each other while reductions are under way in several of them."""
    axes, out = [a for a, n in ctx.mesh.axes.items() if n > 1], Wrong()
    comms = [ctx.comm(a) for a in axes] + [ctx.comm(*ctx.mesh.axes)]
    ranks = [ctx.mesh.group(*c.group.axes).members(ctx.rank) for c in comms]
    for turn in range(2):
        waits = [c.start_all_reduce(torch.full((6,), ctx.rank + i + turn).float().to(ctx.device))
                 for i, c in enumerate(comms)]  # fmt: skip
        for a, b in pairwise(comms):
            a.all_gather(torch.zeros(2, device=ctx.device), 0)
            b.all_gather(torch.zeros(3, device=ctx.device), 0)
        for i, (wait, members) in reversed(list(enumerate(zip(waits, ranks, strict=True)))):
            problem = differs(wait(), torch.full((6,), float(sum(members) + len(members) * (i + turn))))
            if problem:
                out.append(
                    f"all-reduce over {comms[i].group.axes} between others on rank {ctx.rank} {problem}"
                )
    return out
