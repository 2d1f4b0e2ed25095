"""The conformance kit's checks of edge cases: large tensors and those without dims, odd values, sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ...comm.transport import PRIMITIVES
from ...runtime.context import ParallelContext
from .collectives import RankCheck, Wrong, check
from .samples import values, wide

LARGE = (4_097, 1 << 14, (1 << 14) + 3, 1 << 22)
"""Numbers of float32 elements: a little more than 16 KiB; 64 KiB; a little more; and, for groups of two, where it is
fast, 16 MB, more than a network buffers: ranks that all send before they receive wait for ever."""


@check
def large(t: RankCheck, primitive: str, sizes: Sequence[int]) -> None:
    """A failure is in how this primitive splits large data, or sends before it receives."""
    for n in [n + -n % t.size for n in sizes if t.size == 2 or n < LARGE[-1]]:
        every = t.every(lambda p: wide((n,), p, torch.float32, t.size))  # noqa: B023  called at once
        for how, call, want in t.calls(primitive, every, 1):
            t.same(f"{primitive} {how} of {n} elements", call(t.mine(every)), want)


@check
def without_dims(t: RankCheck, primitive: str) -> None:
    """A failure is in the shape or dtype of the result for a tensor without dims."""
    known = PRIMITIVES.get(primitive)
    if known is None or not {"dim", "split_dim"} & known.arguments.keys():
        for dtype in t.dtypes:
            t.only(primitive, partial(_scalar, dtype), f"a {dtype} tensor of no dims")


def _scalar(dtype: torch.dtype, position: int) -> Tensor:
    x = values((1,), position, dtype)[0]
    return x if dtype is torch.bool else x + 2  # torch_xla folds the scalars 0 and 1 into a program


@check
def odd_values(t: RankCheck, primitive: str, loses: Sequence[str] = ()) -> None:
    """A failure is in this primitive's result for NaN, infinity, denormal or negative numbers: a maximum with NaN is
    NaN, a sum out of range infinite. Except what the backend ``loses``."""
    nan, inf, zero = float("nan"), float("inf"), 0.0 if "the sign of zero" in loses else -0.0
    for dtype in [d for d in t.dtypes if d.is_floating_point]:
        info = torch.finfo(dtype)

        def rows(*numbers: float, dtype: torch.dtype = dtype) -> Tensor:
            return torch.tensor(numbers, dtype=dtype).repeat(t.k, 1)

        odd = t.every(lambda p: rows(*((nan, -inf, inf) if p == t.size - 1 else (1.0, -2.0, 3.0)), zero))
        small = t.every(partial(values, (t.k, t.k), dtype=dtype))
        t.only(primitive, [-1 - x for x in small], f"negative {dtype}")
        if "reduce" not in primitive:
            t.only(primitive, odd, f"{dtype} numbers that are not finite")
            continue
        if primitive != "all_reduce max" or "NaN in a maximum" not in loses:
            _odd_sums(t, primitive, odd, f"NaN and infinity of {dtype}")
        if t.comm.eager and "denormal numbers" not in loses:
            t.only(primitive, [x * (info.smallest_normal * info.eps) for x in small], f"denormal {dtype}")
        huge = rows(info.max, -info.max, info.max / 2, -info.max / 4)
        _odd_sums(t, primitive, [huge] * t.size, f"the largest numbers of {dtype}")


def _odd_sums(t: RankCheck, primitive: str, every: list[Tensor], note: str) -> None:
    """As ``only``, but a computed NaN may have any bits."""
    for how, call, want in t.calls(primitive, every):
        got = call(t.mine(every)).cpu()
        right = got.shape == want.shape and bool(((got == want) | (got.isnan() & want.isnan())).all())
        t.expect(right, f"{primitive} {how} of {note} is {got.tolist()}, not {want.tolist()},")


@check
def precise(t: RankCheck, dtype: torch.dtype) -> None:
    """A failure is in the dtype of a sum, which rounds once for each addend, up as often as down. Maxima and integers
    are exact, and calls repeat bit for bit, on all ranks alike."""
    for n in [n + -n % t.size for n in ((8, 1024, 5_000) if t.comm.eager else (1024,))]:
        every = t.every(lambda p: _some(n, p, dtype, t.size))  # noqa: B023  called at once
        _sums(t, every, f"{n} numbers of {dtype}")
        if dtype.is_floating_point and n > 1024:  # their sums lie half-way between two numbers, often
            _sums(t, [(x % 1 + 1).to(dtype) for x in every], f"{n} numbers from 1 to 2 of {dtype}")


def _some(n: int, position: int, dtype: torch.dtype, size: int) -> Tensor:
    g = torch.Generator().manual_seed(position)
    if dtype.is_floating_point:
        return torch.randn(n, generator=g, dtype=torch.float64).to(dtype)
    top = torch.iinfo(dtype).max // (size + 1)
    return torch.randint(top - min(top, 1000), top, (n,), generator=g, dtype=torch.int64).to(dtype)


def _sums(t: RankCheck, every: list[Tensor], note: str) -> None:
    comm, stack, dtype = t.comm, torch.stack(every), every[0].dtype
    x, whole = t.mine(every), slice(None)
    sums: dict[str, tuple[Callable[[], Tensor], slice]] = {"all_reduce": (lambda: comm.all_reduce(x), whole)}
    if comm.eager:
        chunk = len(x) // t.size
        sums["start_all_reduce"] = (lambda: comm.start_all_reduce(x)(), whole)  # noqa: PLW0108
        sums["reduce_scatter"] = (lambda: comm.reduce_scatter(x, 0), slice(t.me * chunk, (t.me + 1) * chunk))
    for name, (call, part) in sums.items():
        first, second = (call().cpu() for _ in range(2))
        t.same(f"the second {name} of {note}", second, first)
        if name != "reduce_scatter":
            seen = comm.all_gather(first.unsqueeze(0).to(x.device), 0).cpu().view(torch.uint8)
            t.expect(bool((seen == seen[0]).all()), f"{name} of {note} differs in its last bits between ranks,")
        if not dtype.is_floating_point:
            t.same(f"{name} of {note}", first, stack.sum(0, dtype=dtype)[part])
            continue
        exact, size = stack.double().sum(0)[part], stack.double().abs().sum(0)[part]
        far = (first.double() - exact).abs() - size * (t.size * torch.finfo(dtype).eps / 2)
        more = "more than its roundings allow"
        t.expect(bool((far <= 0).all()), f"{name} of {note} is off by {float(far.max()):.1e} {more}")
        bias = float(((first.double() - exact) / size).mean()) / torch.finfo(dtype).eps
        # four standard deviations of the mean, and a margin. The reference is too coarse for float64
        fair = dtype is torch.float64 or abs(bias) <= 0.03 + len(size) ** -0.5
        t.expect(fair, f"{name} of {note} is {bias:.2f} eps off on average, as if cut off and not rounded,")
    t.same(f"the maximum of {note}", comm.all_reduce(x, "max"), stack.amax(0))


def full_float32(ctx: ParallelContext) -> Wrong:
    """A failure is in a setting: float32 matmuls take fewer bits, as TF32 does, and so will the layers' tests."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # from torch 2.9 on, whichever way it was set
        set_to = {name: getattr(torch.backends, name).matmul.fp32_precision for name in ("cuda", "mkldnn")}
    else:
        set_to = {"float32": torch.get_float32_matmul_precision()}
    low = [f"of {name} it is {how!r}" for name, how in set_to.items() if how not in ("none", "ieee", "highest")]
    remedy = 'call torch.set_float32_matmul_precision("highest"), and unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE'
    what = f"the precision of float32 matmuls is lowered on rank {ctx.rank}: {', '.join(low)}: {remedy}"
    return Wrong([what] if low else [])
