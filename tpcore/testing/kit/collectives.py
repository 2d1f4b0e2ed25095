"""The conformance kit's checks of collectives: functions of (ctx, ...) that return messages about errors. They
return and do not raise, so that ranks stay in step and report all errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial, update_wrapper
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from ...comm.comm import Comm
from ...comm.transport import PRIMITIVES as PRIMITIVES_BY_NAME
from ...comm.transport import TABLE, Primitive
from ...runtime.context import ParallelContext
from .samples import bits, multiple, values, wide

Calls = list[tuple[str, Callable[[Tensor], Tensor], Tensor]]
Made = Callable[[int], Tensor]
"""What the member at a position of the group sends."""
Arguments = ParamSpec("Arguments")


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
        self.reached(error, allowed)

    def reached(self, error: float, allowed: float) -> None:
        if not error / max(allowed, 1e-300) < self.error / max(self.allowed, 1e-300):
            self.error, self.allowed = error, allowed


class RankCheck:
    """A check on this rank: its group, over tp unless another is given, and what it has found ``wrong``."""

    def __init__(self, ctx: ParallelContext, comm: Comm | None = None, wrong: Wrong | None = None) -> None:
        self.ctx, self.comm = ctx, comm or ctx.comm("tp")
        self.size, self.me = self.comm.size, int(self.comm.position.cpu().reshape(-1)[0])
        self.k = multiple(self.size)
        self.wrong = Wrong() if wrong is None else wrong

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """All dtypes that the backend sums. float32 alone on a lazy one, which compiles a program for each."""
        return self.ctx.backend.capabilities.dtypes if self.comm.eager else (torch.float32,)

    def expect(self, holds: bool, message: str) -> None:
        if not holds:
            self.wrong.append(f"{message} on rank {self.ctx.rank}")

    def same(self, what: str, got: Tensor, want: Tensor) -> None:
        """Expect equal bits, dtype and shape."""
        if problem := differs(got, want):
            self.wrong.append(f"{what} on rank {self.ctx.rank} {problem}")

    def every(self, made: Made) -> list[Tensor]:
        return [made(p) for p in range(self.size)]

    def mine(self, every: Sequence[Tensor]) -> Tensor:
        """A copy of this rank's, on the device."""
        return every[self.me].to(self.ctx.device, copy=True)

    def calls(self, name: str, every: list[Tensor], count: int | None = None) -> Calls:
        return calls(self.comm, name, every, count)

    def only(self, name: str, sent: Made | list[Tensor], note: str) -> None:
        """Check all calls of one primitive on tensors by position; what a function makes keeps its memory format."""
        for how, call, want in self.calls(name, self.every(sent) if callable(sent) else sent):
            local = sent(self.me) if callable(sent) else sent[self.me].clone()
            self.same(f"{name} {how} of {note}", call(local.to(self.ctx.device)), want)

    def spread(self, shape: tuple[int, ...], primitive: str, dtype: torch.dtype) -> list[Tensor]:
        """Numbers from all of the dtype's range. Bits, if they are only moved."""
        if primitive in MOVING:
            return self.every(lambda p: bits(shape, p, dtype, normal=not self.comm.eager))
        return self.every(lambda p: wide(shape, p, dtype, self.size))


def check(
    body: Callable[Concatenate[RankCheck, Arguments], None],
) -> Callable[Concatenate[ParallelContext, Arguments], Wrong]:
    """A check of (ctx, ...), made of one that writes to a ``RankCheck``."""

    def run(ctx: ParallelContext, /, *args: Arguments.args, **named: Arguments.kwargs) -> Wrong:
        check = RankCheck(ctx)
        body(check, *args, **named)
        return check.wrong

    update_wrapper(run, body)
    return run


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


def divides(name: str) -> bool:
    """Whether the group size must divide a dim of the input of ``name``, a primitive or a variant."""
    return bool(PRIMITIVES_BY_NAME[_VARIANTS.get(name, (name, {}))[0]].divides)


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


def flat(x: Tensor) -> Tensor:
    """In one dim, on the CPU. By strides: those of one element may be any, and a view keeps them."""
    x = x.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return x.as_strided((x.numel(),), (1,))


def differs(got: Tensor, want: Tensor) -> str:
    """A message if a result differs in value, dtype or shape; else empty."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    got, want = flat(got), flat(want)
    integers = {2: torch.int16, 4: torch.int32}.get(got.itemsize, torch.uint8)
    a, b = got.view(integers), want.view(integers)
    if torch.equal(a, b):
        return ""
    i = int((a != b).nonzero()[0]) * a.itemsize // got.itemsize
    where = f" from element {i} on" if i else ""
    is_, not_ = (str(t[i : i + 8].tolist()) for t in (got, want))
    if is_ == not_:  # a byte of 2 for True, another NaN
        is_, not_ = (f"{t[i].item()} of bytes {t[i : i + 1].view(torch.uint8).tolist()}" for t in (got, want))
    return f"is {is_}...{where}, not {not_}..."


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
def right_values(t: RankCheck, primitive: str, dtype: torch.dtype) -> None:
    """A failure is in the result of this primitive for some dim or dtype, one that is declared as moved too; or in what
    it keeps under ``inference_mode`` and uses outside, or the reverse."""
    for shape, inside in zip(shapes(t.size), itertools.cycle((False, True)), strict=False):
        with torch.inference_mode(inside):
            note = f"{dtype} {shape}" + ", in inference_mode," * inside
            t.only(primitive, partial(values, shape, dtype=dtype), note)
    shape = shapes(t.size)[1]
    t.only(primitive, t.spread(shape, primitive, dtype), f"numbers of all of {dtype}, {shape},")


@check
def empty(t: RankCheck, primitive: str) -> None:
    """A failure is in how this primitive treats tensors without elements."""
    for dtype, shape in itertools.product(t.dtypes, ((0, t.k), (t.k, 0))):
        t.only(primitive, partial(values, shape, dtype=dtype), f"{dtype} {shape}")


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
        of.only(primitive, [values((of.k, 4), r, torch.float32) for r in members], f"{(of.k, 4)} over {names}")


@check
def many(t: RankCheck, method: str, count: int) -> None:
    """A failure is in state that one small call of ``count`` leaves for the next: a counter, a ring of buffers."""
    if not t.comm.eager:
        return
    # seven inputs in turn: 7 divides no number that a counter is likely to wrap at
    n = t.size if divides(method) else 1
    inputs = [[torch.full((n,), p + 100.0 * r) for p in range(t.size)] for r in range(7)]
    tried = [calls(t.comm, method, every, 1)[0] for every in inputs]
    local = [every[t.me].to(t.ctx.device) for every in inputs]
    results = [tried[i % 7][1](local[i % 7]) for i in range(count)]
    wrong = [i for i, y in enumerate(results) if differs(y, tried[i % 7][2])]
    for i in wrong[:1]:
        t.same(f"call {i + 1} of {count} {method} of {n} elements", results[i], tried[i % 7][2])
