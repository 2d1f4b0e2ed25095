"""The conformance kit's checks on both sides of the sizes at which a backend may go another way."""

from __future__ import annotations

import torch

from ...comm.comm import Comm
from ...runtime.context import ParallelContext
from .collectives import Wrong, calls, differs, divides, eager_dtypes
from .samples import values

_POWERS = (5, 8, 10, 12, 14, 16)  # of float32: 64 KiB are 2^14, 256 KiB 2^16
MOST = (1 << 18) + 1


def sizes(comm: Comm, most: int) -> list[int]:
    """Numbers of elements up to ``most``: the least, and those about the group's size, about powers of two
    and, for groups of two, where it is fast, about 1 MiB. One alone on a lazy backend, which compiles a
    program for each."""
    if not comm.eager:
        return [257]
    near = [a + d for a in (comm.size, *(1 << k for k in _POWERS)) for d in (-1, 0, 1)]
    mebibyte = [1 << 18, MOST] if comm.size == 2 else []
    return sorted({n for n in (1, 2, *near, *mebibyte) if n <= most})


def owned(ctx: ParallelContext, primitive: str, most: int) -> Wrong:
    """At every size: the caller changes its input when the call has returned, and the next call sends what
    it has now. The caller writes to its result, and nobody else's changes; nor do results at later calls."""
    comm, out = ctx.comm("tp"), Wrong()
    me, donated = int(comm.position.cpu()), "donate" in primitive
    for n in sizes(comm, most):
        length = n * comm.size if divides(primitive) else n
        first = [values((length,), p, torch.float32) for p in range(comm.size)]
        x, kept = first[me].to(ctx.device, copy=True), []
        for turn in range(3):
            _, call, want = calls(comm, primitive, [t + 8 * turn for t in first], 1)[0]
            kept.append((f"{primitive} {turn + 1} of 3", call(x.clone() if donated else x), want))
            x += 8
        for note, got, want in [*kept, (f"the input of {primitive}", x, first[me] + 24)]:
            if problem := differs(got, want):
                out.append(f"{note}, {length} elements of one tensor, on rank {ctx.rank} {problem}")
        for _, got, _ in kept:
            got.fill_(-1)
    return out


def same_bits(ctx: ParallelContext, most: int) -> Wrong:
    """Sums that round, and maxima of zeros of both signs, have the same bits on every rank: otherwise ranks
    would drift apart."""
    comm, out = ctx.comm("tp"), Wrong()
    for dtype in [d for d in eager_dtypes(ctx) if d.is_floating_point]:
        for n in sizes(comm, most) if dtype is torch.float32 else [min(257, most)]:
            x = torch.rand(n, generator=torch.Generator().manual_seed(ctx.rank)).to(dtype)
            x[::3] = 0.0
            x[:: 3 + 3 * (ctx.rank % 2)].neg_()
            x = x.to(ctx.device)
            total, top, started = comm.all_reduce(x), comm.all_reduce(x, "max"), comm.start_all_reduce(x)()
            for name, y in {"a sum": total, "a maximum": top, "a started sum": started}.items():
                seen = comm.all_gather(y.unsqueeze(0), 0).cpu().view(torch.uint8)
                if not bool((seen == seen[0]).all()):
                    out.append(f"{name} of {n} {dtype} differs between ranks in its last bits")
    return out
