"""The conformance kit's checks of collectives: functions of (ctx, ...) that return messages about errors. They
return and do not raise, so that ranks stay in step and report all errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...comm.comm import Comm
from ...comm.order import InOrder, tree
from ...comm.transport import PRIMITIVES as PRIMITIVES_BY_NAME
from ...comm.transport import TABLE, Primitive
from .rank import RankCheck, Right, check, differs
from .samples import Numbers, kinds, multiple, values, wide

Calls = list[tuple[str, Callable[[Tensor], Tensor], Tensor]]


# values to try for an argument of this name: (number of dims, group size) -> values
TRIED: dict[str, Callable[[int, int], Sequence[Any]]] = {
    "dim": lambda ndim, n: range(-ndim, ndim),
    "src": lambda ndim, n: range(n),
    "op": lambda ndim, n: ["sum"],
    "donate": lambda ndim, n: [False],
    "split_dim": lambda ndim, n: range(-ndim, ndim),
    "to": lambda ndim, n: list(dict.fromkeys(_targets(n))),
}
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all_reduce max": ("all_reduce", {"op": "max"}),
    "all_reduce donate": ("all_reduce", {"donate": True}),
    "start_all_reduce": ("all_reduce", {}),
    "start_reduce_scatter": ("reduce_scatter", {}),
    "start_permute": ("permute", {}),
}
MOVING = tuple(p.name for p in TABLE if not p.sums)
PRIMITIVES = (*PRIMITIVES_BY_NAME, *_VARIANTS)
"""Primitives and variants, in the order in which the kit tests them."""
METHODS = (*PRIMITIVES_BY_NAME, *(name for name in _VARIANTS if name.startswith("start_")))
"""The methods of a transport."""


def _targets(n: int) -> Iterator[tuple[int | None, ...]]:
    yield tuple((i + 1) % n for i in range(n))  # the ring
    yield tuple((i - 1) % n for i in range(n))
    yield (n - 1, *range(1, n - 1), 0)[:n]  # a swap of two members
    yield (n - 1, *[None] * (n - 1))  # one sender only
    yield (*range(1, n), None)  # a line
    yield tuple(range(n))


def primitive_of(name: str) -> Primitive:
    """Of a primitive, a variant or a method."""
    return PRIMITIVES_BY_NAME[_VARIANTS.get(name, (name, {}))[0]]


def _arguments(primitive: Primitive, shape: torch.Size, n: int) -> Iterator[dict[str, Any]]:
    """Arguments to try on a tensor of this shape in a group of ``n``."""
    names = [name for name in primitive.arguments if name != "concat_dim"]
    for chosen in itertools.product(*(TRIED[name](len(shape), n) for name in names)):
        options = dict(zip(names, chosen, strict=True))
        if primitive.divides and shape[options[primitive.divides]] % n:
            continue
        if "split_dim" not in options:
            yield options
            continue
        for concat in range(len(shape)) if options["split_dim"] >= 0 else [-1]:
            yield options | {"concat_dim": concat}


def calls(comm: Comm, name: str, every: list[Tensor], count: int | None = None) -> Calls:
    """(description, call, right result) for the first ``count`` ways to call ``name`` on tensors like ``every``."""
    me, ndim = int(comm.position.cpu()), every[0].ndim
    of, fixed = _VARIANTS.get(name, (name, {}))
    primitive, out = PRIMITIVES_BY_NAME[of], []
    for options in itertools.islice(_arguments(primitive, every[0].shape, comm.size), count):
        chosen = options | fixed
        # in the transport's form: dims are not negative, and a member that sends nothing has target -1
        plain = [plain_argument(k, v, ndim) for k, v in chosen.items()]
        want = primitive.meaning(every, me, *plain)
        how = " ".join(f"{k} {v}" for k, v in chosen.items() if k not in ("op", "donate"))
        out.append((how, _call(comm, name, of, chosen), want))
    return out


def plain_argument(name: str, value: Any, ndim: int) -> Any:
    if name.endswith("dim"):
        return value % ndim
    return tuple(-1 if t is None else t for t in value) if name == "to" else value


def _call(comm: Comm, name: str, of: str, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    if name.startswith("start_"):
        return lambda x: getattr(comm, name)(x, **options)()
    return partial(getattr(comm, of), **options)


@check
def joined(t: RankCheck) -> None:
    """A failure is in ``start`` or in making a Transport: rank, size, members, device."""
    ctx, comm = t.ctx, t.comm
    kind, index = (comm.position.dtype, tuple(comm.position.shape)), ctx.coord("tp")
    t.expect(kind == (torch.int64, (1,)), f"comm.position is {kind}, not one int64 element")
    t.expect(t.me == index, f"comm.position is {t.me} and not {index}")
    here, there = comm.position.device, ctx.device
    t.expect(here.type == there.type, f"comm.position is on {here}, the backend's tensors on {there}")
    t.expect(t.size == ctx.mesh.axes["tp"], f"a tp group of size {t.size}, not {ctx.mesh.axes['tp']}")
    t.expect(comm.process_group is not None, "process_group is None")


def shapes(n: int) -> tuple[tuple[int, ...], ...]:
    """Of one to five dims, some of which ``n`` ranks divide."""
    k = multiple(n)
    return (k,), (k, 2 * k), (2 * k, k, k), (k, 1, 2 * k, k), (1, k, 2, 1, k)


@check
def right_values(t: RankCheck, primitive: str, dtype: torch.dtype, loses: Sequence[str] = ()) -> None:
    """A failure is in this primitive's result for some dim, shape, dtype, one declared as moved too, or numbers: a
    maximum with NaN is NaN, a sum out of range infinite, and it rounds once for each addend; in its memory; or in
    what it keeps of a call, under ``inference_mode`` too, and uses in the next."""
    numbers = Numbers(1, loses, 1280 * t.k, t.comm.eager)
    op = str(_VARIANTS.get(primitive, ("", {}))[1].get("op", "sum")) if primitive_of(primitive).sums else ""
    for shape, kind, inside in _inputs(t, primitive, kinds(dtype, op), t.comm.eager or dtype is torch.float32):
        every = [numbers.of(kind, shape, dtype, op, 7, position=p, rank=p, size=t.size) for p in range(t.size)]
        if not shape and not t.comm.eager:  # torch_xla folds the scalars 0 and 1 into a program
            every = [x + 2 for x in every]
        with torch.inference_mode(inside):
            made(t, primitive, every, f"{kind} {dtype} numbers of {shape}" + ", in inference_mode," * inside, kind)


def _inputs(t: RankCheck, primitive: str, kinds: Sequence[str], more: bool) -> Iterator[tuple[Any, str, bool]]:
    """Shapes, kinds of numbers, and whether in ``inference_mode``. Without ``more`` those of few programs, for a lazy
    backend compiles one for each call."""
    yield from zip(shapes(t.size), itertools.repeat("small"), itertools.cycle((False, True)))
    for kind in kinds:
        yield shapes(t.size)[1], kind, False
    if more:
        yield from (((0, t.k), "small", False), ((t.k, 0), "small", False), ((t.k, 1280), kinds[-1], False))
        if not {"dim", "split_dim"} & primitive_of(primitive).arguments.keys():
            yield (), "small", False


def made(
    t: RankCheck, primitive: str, every: list[Tensor], note: str, kind: str = "", count: int | None = None
) -> None:
    """Judge all calls, or ``count``, of one primitive on tensors by position."""
    donated, sums, eps = "donate" in primitive, primitive_of(primitive).sums, 0.0
    if kind == "mixed":  # rounded once for each addend
        eps = t.size * torch.finfo(every[0].dtype).eps
    sizes = calls(t.comm, primitive, [x.double().abs() if eps else x for x in every], count)
    for (how, call, want), (_, _, size) in zip(calls(t.comm, primitive, every, count), sizes, strict=True):
        what = f"{primitive} {how} of {note}"
        x = every[t.me].to(t.ctx.device, copy=True)
        differentiable = x.is_floating_point() and not (donated or torch.is_inference_mode_enabled())
        got = call(x.requires_grad_(differentiable))
        right = Right(want, sums, eps * size if eps else None, what if "all_reduce" in primitive else "")
        t.judge(what, got, right, t.comm, None if donated else x)
        if not donated:
            t.same(f"{what}: the input afterwards", x, every[t.me])
            if eps:
                t.same(f"{what}: the second result", call(x), got)


@check
def overlapped(t: RankCheck) -> None:
    """A failure is in a method that starts: results mixed up between several under way, which ranks wait for in
    different orders; an input that is read after the call; a second wait."""
    comm, n, me = t.comm, t.size, t.comm.position.float()  # a tensor: one program for all ranks of a compiling backend
    waits = []
    for i in range(4):
        x = me.repeat(9) + i
        waits.append(comm.start_all_reduce(x))
        x.zero_()  # it is the caller's again
    moved = comm.start_permute(me.repeat(9), [*range(1, n), 0])
    gathered = comm.all_gather(me, 0)
    forward = comm.eager and t.me % 2
    for i, wait in sorted(enumerate(waits), reverse=not forward):
        for turn in ("first", "second"):
            want = torch.full((9,), float(n * i + n * (n - 1) // 2))
            t.same(f"all-reduce {i} of 4 under way, at its {turn} wait,", wait(), want)
    want = ((comm.position.cpu() - 1) % n).float().repeat(9)
    t.same("a permute under way beside all-reduces", moved(), want)
    t.same("a gather between the start of an all-reduce and its wait", gathered, torch.arange(n).float())


@check
def groups(t: RankCheck, primitive: str) -> None:
    """A failure is in ``connect``: the ranks of a group, or their order. Groups are of one axis, of several in either
    order, of a part of them, of the world."""
    ctx, axes = t.ctx, tuple(t.ctx.mesh.axes)
    tried: list[tuple[tuple[str, ...], int | None]] = [((a,), None) for a in axes]
    tried += [(axes[:2], None), ((axes[0], axes[-1]), None), (axes, None), (axes[::-1], None)]
    tried += [(axes, 2)] if ctx.mesh.size % 2 == 0 else []
    for names, within in tried:
        comm = ctx.comm(*names, within=within)
        if comm.size == 1:
            continue
        members = ctx.mesh.group(*names, within=within).members(ctx.rank)
        of = RankCheck(ctx, comm, t.wrong)
        if of.size != len(members) or members[of.me] != ctx.rank:
            t.wrong.append(f"rank {ctx.rank} is at {of.me} of {of.size} in {names} group {members}")
            continue
        made(of, primitive, [values((of.k, 4), r, torch.float32) for r in members], f"{(of.k, 4)} over {names}")
        of.finish()


@check
def many(t: RankCheck, method: str, count: int) -> None:
    """A failure is in state that one small call of ``count`` leaves for the next: a counter, a ring of buffers."""
    if not t.comm.eager:
        return
    # seven inputs in turn: 7 divides no number that a counter is likely to wrap at
    n = t.size if primitive_of(method).divides else 1
    inputs = [[torch.full((n,), p + 100.0 * r) for p in range(t.size)] for r in range(7)]
    tried = [calls(t.comm, method, every, 1)[0] for every in inputs]
    local = [every[t.me].to(t.ctx.device) for every in inputs]
    results = [tried[i % 7][1](local[i % 7]) for i in range(count)]
    wrong = [i for i, y in enumerate(results) if differs(y, tried[i % 7][2])]
    for i in wrong[:1]:
        t.same(f"call {i + 1} of {count} {method} of {n} elements", results[i], tried[i % 7][2])


LARGE = ((1 << 14) + 3, 1 << 22)
"""Numbers of float32 elements: a little more than 64 KiB; and, for groups of two, where it is fast, 16 MB, more than a
network buffers: ranks that all send before they receive wait for ever."""


@check
def large(t: RankCheck, primitive: str, sizes: Sequence[int]) -> None:
    """A failure is in how this primitive splits large data, or sends before it receives."""
    for n in [n + -n % t.size for n in sizes if t.size == 2 or n < LARGE[-1]]:
        made(t, primitive, [wide((n,), p, torch.float32, t.size) for p in range(t.size)], f"{n} elements", count=1)


@check
def in_order(t: RankCheck, dtype: torch.dtype, sizes: Sequence[int]) -> None:
    """A failure is in ``all_to_all`` or ``all_gather``, by which ``reproducible`` sums are one tree at every size; in a
    group of two in how its own sum rounds."""
    n = t.size
    if n & (n - 1) or not dtype.is_floating_point:
        return
    transport = t.comm.transport if n == 2 else InOrder(t.comm.transport)
    for size in (*range(1, 18), *sizes) if t.comm.eager else (17,):
        if n * size > LARGE[-1]:
            continue
        every = [torch.randn(n * size, generator=torch.Generator().manual_seed(p)).to(dtype) for p in range(n)]
        mine, want = every[t.me].to(t.ctx.device), tree(every)
        what = f"in one tree, {dtype}, {n * size} numbers"
        t.same(f"all_reduce {what}", transport.all_reduce(mine, "sum", False), want)
        t.same(f"reduce_scatter {what}", transport.reduce_scatter(mine, 0), want.chunk(n)[t.me])
