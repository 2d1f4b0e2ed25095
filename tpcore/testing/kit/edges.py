"""The conformance kit's checks of edge cases: large and odd tensors, odd values, repeated calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product

import torch
from torch import Tensor

from ...comm.comm import Comm
from ...comm.transport import PRIMITIVES
from ...runtime.context import ParallelContext
from .collectives import Made, Wrong, calls, differs, divides, eager_dtypes, only, spread
from .samples import multiple, values, wide

LARGE = (4_097, 1 << 14, (1 << 14) + 3, 1 << 22)
"""Numbers of float32 elements: a little more than 16 KiB; 64 KiB; a little more; and, for groups of two, where it is
fast, 16 MB, more than a network buffers: ranks that all send before they receive wait for ever."""


_POWERS = (5, 8, 10, 12, 14, 16)  # of float32: 64 KiB are 2^14, 256 KiB 2^16
MOST = (1 << 18) + 1


def large(ctx: ParallelContext, primitive: str, sizes: Sequence[int]) -> Wrong:
    """Every byte arrives, and inputs stay unchanged, whatever the size."""
    comm, out = ctx.comm("tp"), Wrong()
    me = int(comm.position.cpu())
    for n in [n for n in sizes if comm.size == 2 or n < LARGE[-1]]:
        n += -n % comm.size  # noqa: PLW2901  divisible by the number of ranks
        for note, every in _forms(comm, primitive, n, eager_dtypes(ctx)):
            for how, call, want in calls(comm, primitive, every, 1 if every[0].ndim == 1 else None):
                x = every[me].to(ctx.device, copy=True)
                if problem := differs(call(x), want):
                    out.append(f"{primitive} {how} of {note} on rank {ctx.rank} {problem}")
                if "donate" not in primitive and differs(x, every[me]):
                    out.append(f"{primitive} {how} of {note} changed its input on rank {ctx.rank}")
    return out


def _forms(comm: Comm, primitive: str, n: int, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, list[Tensor]]]:
    """``n`` elements of float32; where that is fast also of other item sizes, as a matrix, and as a transposed one."""
    yield f"{n} elements", [wide((n,), p, torch.float32, comm.size) for p in range(comm.size)]
    if not comm.eager or n >= LARGE[-1]:
        return
    one_of_each = {d.itemsize: d for d in dtypes if d is not torch.bool and d.itemsize != 4}
    for dtype in one_of_each.values():
        yield f"{n} elements of {dtype}", spread((n,), comm, primitive, dtype)
    rows, columns = 2 * comm.size, -(-n // comm.size**2) * comm.size
    yield f"a {rows} x {columns} matrix", spread((rows, columns), comm, primitive, torch.float32)
    across = spread((columns, rows), comm, primitive, torch.float32)
    yield f"a transposed {columns} x {rows} matrix", [t.t() for t in across]


def without_dims(ctx: ParallelContext, primitive: str) -> Wrong:
    """Tensors without dims keep their shape and dtype, in primitives that take them."""
    known = PRIMITIVES.get(primitive)
    if known is not None and {"dim", "split_dim"} & known.arguments.keys():
        return Wrong()
    out = Wrong()
    for dtype in eager_dtypes(ctx):
        out += only(ctx, ctx.comm("tp"), primitive, partial(_scalar, dtype), f"a {dtype} tensor of no dims")
    return out


def _scalar(dtype: torch.dtype, position: int) -> Tensor:
    x = values((1,), position, dtype)[0]
    return x if dtype is torch.bool else x + 2  # torch_xla folds the scalars 0 and 1 into a program


def odd_values(ctx: ParallelContext, primitive: str, loses: Sequence[str] = ()) -> Wrong:
    """NaN, infinity and negative numbers arrive, a maximum with NaN is NaN, a sum out of range is infinite, sums of
    denormal numbers are exact, moved values keep their bits. Except what the backend ``loses``."""
    out = Wrong()
    for dtype in [d for d in eager_dtypes(ctx) if d.is_floating_point]:
        out += _odd_values(ctx, primitive, dtype, loses)
    return out


def _odd_values(ctx: ParallelContext, primitive: str, dtype: torch.dtype, loses: Sequence[str]) -> Wrong:
    comm, info = ctx.comm("tp"), torch.finfo(dtype)
    k = multiple(comm.size)
    nan, inf, zero = float("nan"), float("inf"), 0.0 if "the sign of zero" in loses else -0.0

    def odd(position: int) -> Tensor:
        one = [nan, -inf, inf, zero] if position == comm.size - 1 else [1.0, -2.0, 3.0, zero]
        return torch.tensor(one, dtype=dtype).repeat(k, 1)

    out = only(ctx, comm, primitive, lambda p: -1 - values((k, k), p, dtype), f"negative {dtype}")
    if "reduce" not in primitive:
        out += only(ctx, comm, primitive, odd, f"{dtype} numbers that are not finite")
        return out
    if primitive != "all_reduce max" or "NaN in a maximum" not in loses:
        out += _odd_sums(ctx, primitive, odd, f"NaN and infinity of {dtype}")
    if comm.eager and "denormal numbers" not in loses:
        tiny = info.smallest_normal * info.eps
        out += only(ctx, comm, primitive, lambda p: values((k, k), p, dtype) * tiny, f"denormal {dtype}")
    huge = torch.tensor([info.max, -info.max, info.max / 2, -info.max / 4], dtype=dtype).repeat(k, 1)
    out += _odd_sums(ctx, primitive, lambda p: huge, f"the largest numbers of {dtype}")
    return out


def _odd_sums(ctx: ParallelContext, primitive: str, made: Made, note: str) -> Wrong:
    """As ``only``, but a computed NaN may have any bits."""
    comm, out = ctx.comm("tp"), Wrong()
    for how, call, want in calls(comm, primitive, [made(p) for p in range(comm.size)]):
        got = call(made(int(comm.position.cpu())).to(ctx.device)).cpu()
        if got.shape != want.shape or not bool(((got == want) | (got.isnan() & want.isnan())).all()):
            out.append(f"{primitive} {how} of {note} on rank {ctx.rank} is {got.tolist()}, not {want.tolist()}")
    return out


def precise(ctx: ParallelContext, dtype: torch.dtype) -> Wrong:
    """A sum rounds once for each addend, up as often as down; maxima and integers are exact; calls repeat bit for
    bit."""
    comm, out = ctx.comm("tp"), Wrong()
    for n in (8, 1024, 5_000) if comm.eager else (1024,):
        n += -n % comm.size  # noqa: PLW2901  divisible by the number of ranks
        every = [_some(n, p, dtype, comm.size) for p in range(comm.size)]
        out += _sums(ctx, every, f"{n} numbers of {dtype} on rank {ctx.rank}")
        if dtype.is_floating_point and n > 1024:  # their sums lie half-way between two numbers, often
            above = [(t % 1 + 1).to(dtype) for t in every]
            out += _sums(ctx, above, f"{n} numbers from 1 to 2 of {dtype} on rank {ctx.rank}")
    return out


def _some(n: int, position: int, dtype: torch.dtype, size: int) -> Tensor:
    g = torch.Generator().manual_seed(position)
    if dtype.is_floating_point:
        return torch.randn(n, generator=g, dtype=torch.float64).to(dtype)
    top = torch.iinfo(dtype).max // (size + 1)
    return torch.randint(top - min(top, 1000), top, (n,), generator=g, dtype=torch.int64).to(dtype)


def _sums(ctx: ParallelContext, every: list[Tensor], note: str) -> Wrong:
    comm, out, dtype = ctx.comm("tp"), Wrong(), every[0].dtype
    me, stack = int(comm.position.cpu()), torch.stack(every)
    x, mine = every[me].to(ctx.device), slice(None)
    sums: dict[str, tuple[Callable[[], Tensor], slice]] = {"all_reduce": (lambda: comm.all_reduce(x), mine)}
    if comm.eager:
        chunk = len(x) // comm.size
        sums["start_all_reduce"] = (lambda: comm.start_all_reduce(x)(), mine)  # noqa: PLW0108
        sums["reduce_scatter"] = (lambda: comm.reduce_scatter(x, 0), slice(me * chunk, (me + 1) * chunk))
    for name, (call, part) in sums.items():
        first, second = (call().cpu() for _ in range(2))
        if differs(second, first):
            out.append(f"{name} of {note} has other bits the second time")
        if dtype.is_floating_point:
            exact, size = stack.double().sum(0)[part], stack.double().abs().sum(0)[part]
            far = (first.double() - exact).abs() - size * (comm.size * torch.finfo(dtype).eps / 2)
            if not bool((far <= 0).all()):
                out.append(f"{name} of {note} is off by {float(far.max()):.1e} more than its roundings allow")
            bias = float(((first.double() - exact) / size).mean()) / torch.finfo(dtype).eps
            # four standard deviations of the mean, and a margin. The reference is too coarse for float64
            if dtype is not torch.float64 and abs(bias) > 0.03 + len(size) ** -0.5:
                out.append(f"{name} of {note} is {bias:.2f} eps off on average, as if cut off and not rounded")
        elif problem := differs(first, stack.sum(0, dtype=dtype)[part]):
            out.append(f"{name} of {note} {problem}")
    if problem := differs(comm.all_reduce(x, "max").cpu(), stack.amax(0)):
        out.append(f"the maximum of {note} {problem}")
    return out


def started(ctx: ParallelContext) -> Wrong:
    """A reduction reads its input when it is started: the caller may change it before the wait."""
    comm, out = ctx.comm("tp"), Wrong()
    for dtype, n in product([d for d in eager_dtypes(ctx) if d is not torch.bool], (8, 100_000)):
        x = (comm.position + 1).to(dtype).repeat(n)
        wait = comm.start_all_reduce(x)
        x.zero_()
        want = torch.full((n,), comm.size * (comm.size + 1) // 2, dtype=dtype)
        first, second = wait(), wait()
        if problem := differs(first, want):
            out.append(f"start_all_reduce of {n} {dtype} whose input changes meanwhile {problem}")
        if problem := differs(second, want):
            out.append(f"a second wait for start_all_reduce of {n} {dtype} {problem}")
        x = (comm.position + 1).to(dtype).repeat(n * comm.size)
        part = comm.start_reduce_scatter(x, 0)
        x.zero_()
        if problem := differs(part(), want) or differs(part(), want):
            out.append(f"start_reduce_scatter of {comm.size} x {n} {dtype} whose input changes meanwhile {problem}")
        x = (comm.position + 1).to(dtype).repeat(n)
        moved = comm.start_permute(x, [*range(1, comm.size), 0])
        x.zero_()
        want = ((comm.position.cpu() - 1) % comm.size + 1).to(dtype).repeat(n)
        if problem := differs(moved(), want) or differs(moved(), want):
            out.append(f"start_permute of {n} {dtype} whose input changes meanwhile {problem}")
    return out


def full_float32(ctx: ParallelContext) -> Wrong:
    """No setting of torch lets matmuls round float32 to fewer bits, which the tolerances of the layers do not allow."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # from torch 2.9 on, whichever way it was set
        set_to = {name: getattr(torch.backends, name).matmul.fp32_precision for name in ("cuda", "mkldnn")}
    else:
        set_to = {"float32": torch.get_float32_matmul_precision()}
    low = [f"of {name} it is {how!r}" for name, how in set_to.items() if how not in ("none", "ieee", "highest")]
    remedy = 'call torch.set_float32_matmul_precision("highest"), and unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE'
    what = f"the precision of float32 matmuls is lowered on rank {ctx.rank}: {', '.join(low)}: {remedy}"
    return Wrong([what] if low else [])


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
                out.append(f"all-reduce over {comms[i].group.axes} between others on rank {ctx.rank} {problem}")
    return out


def _sizes(comm: Comm, most: int) -> list[int]:
    """Numbers of elements up to ``most``: the least, and those about the group's size, about powers of two and, for
    groups of two, where it is fast, about 1 MiB. One alone on a lazy backend, which compiles a program for each."""
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
    for n in _sizes(comm, most):
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
    """Sums that round, and maxima of zeros of both signs, have the same bits on every rank."""
    comm, out = ctx.comm("tp"), Wrong()
    for dtype in [d for d in eager_dtypes(ctx) if d.is_floating_point]:
        for n in _sizes(comm, most) if dtype is torch.float32 else [min(257, most)]:
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
