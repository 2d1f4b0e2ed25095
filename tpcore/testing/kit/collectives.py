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
from ...comm.transport import PRIMITIVES as PRIMITIVES_BY_NAME
from ...comm.transport import TABLE, Primitive
from ...errors import BackendError
from ...runtime.context import ParallelContext
from .samples import bits, multiple, values, wide


def shapes(n: int) -> tuple[tuple[int, ...], ...]:
    """Of one to five dims, some of which ``n`` ranks divide."""
    k = multiple(n)
    return (k,), (k, 2 * k), (2 * k, k, k), (k, 1, 2 * k, k), (1, k, 2, 1, k)


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


Calls = list[tuple[str, Callable[[Tensor], Tensor], Tensor]]

# values to try for an argument of this name: (number of dims, group size) -> values
_TRIED: dict[str, Callable[[int, int], Sequence[Any]]] = {
    "dim": lambda ndim, n: range(-ndim, ndim),
    "src": lambda ndim, n: range(n),
    "op": lambda ndim, n: ["sum"],
    "donate": lambda ndim, n: [False],
    "split_dim": lambda ndim, n: range(-ndim, ndim),
    # the ring, the ring backwards, a swap of two members, one sender only, a line, the identity
    "to": lambda ndim, n: list(
        dict.fromkeys(
            [
                tuple((i + 1) % n for i in range(n)),
                tuple((i - 1) % n for i in range(n)),
                (n - 1, *range(1, n - 1), 0)[:n],
                (n - 1, *[None] * (n - 1)),
                (*range(1, n), None),
                tuple(range(n)),
            ]
        )
    ),
}
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all_reduce max": ("all_reduce", {"op": "max"}),
    "all_reduce donate": ("all_reduce", {"donate": True}),
    "start_all_reduce": ("all_reduce", {}),
    "start_reduce_scatter": ("reduce_scatter", {}),
    "start_permute": ("permute", {}),
}
MOVING = tuple(p.name for p in TABLE if not p.sums)
_AFTER = list(PRIMITIVES_BY_NAME).index("all_reduce") + 1
PRIMITIVES = (*list(PRIMITIVES_BY_NAME)[:_AFTER], *_VARIANTS, *list(PRIMITIVES_BY_NAME)[_AFTER:])
"""Primitives and variants, in the order in which the kit tests them."""
METHODS = (*PRIMITIVES_BY_NAME, *(name for name in _VARIANTS if name.startswith("start_")))
"""The methods of a transport."""


def divides(name: str) -> bool:
    """Whether the group size must divide a dim of the input of ``name``, a primitive or a variant."""
    return bool(PRIMITIVES_BY_NAME[_VARIANTS.get(name, (name, {}))[0]].divides)


def _arguments(primitive: Primitive, shape: torch.Size, n: int) -> Iterator[dict[str, Any]]:
    """Arguments to try on a tensor of this shape in a group of ``n``."""
    ndim = len(shape)
    tried = [_TRIED[name](ndim, n) for name in primitive.arguments if name != "concat_dim"]
    for chosen in itertools.product(*tried):
        given = dict(zip([a for a in primitive.arguments if a != "concat_dim"], chosen, strict=True))
        if primitive.divides and shape[given[primitive.divides]] % n:
            continue
        if "split_dim" not in given:
            yield given
            continue
        for concat in range(ndim) if given["split_dim"] >= 0 else [-1]:
            yield given | {"concat_dim": concat}


def calls(comm: Comm, name: str, every: list[Tensor], count: int | None = None) -> Calls:
    """(description, call, right result) for the first ``count`` ways to call ``name`` on tensors like ``every``."""
    me, ndim = int(comm.position.cpu()), every[0].ndim
    of, fixed = _VARIANTS.get(name, (name, {}))
    primitive, out = PRIMITIVES_BY_NAME[of], []
    for given in itertools.islice(_arguments(primitive, every[0].shape, comm.size), count):
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
    if name.startswith("start_"):
        return lambda x: getattr(comm, name)(x, **given)()
    return partial(getattr(comm, of), **given)


def differs(got: Tensor, want: Tensor) -> str:
    """A message if a result differs in value, dtype or shape; else empty."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    got, want = (t.detach().cpu().contiguous().view(-1) for t in (got, want))
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


def _each(ctx: ParallelContext, comm: Comm, primitive: str, every: list[Tensor]) -> Wrong:
    note = f"{tuple(every[0].shape)} over {comm.group.axes}"
    return only(ctx, comm, primitive, lambda p: every[p].clone(), note)


Made = Callable[[int], Tensor]


def only(ctx: ParallelContext, comm: Comm, name: str, made: Made, note: str, count: int | None = None) -> Wrong:
    """Check the first ``count`` calls of one primitive on the tensors that ``made`` returns by position."""
    me, out = int(comm.position.cpu()), Wrong()
    every = [made(p) for p in range(comm.size)]
    for how, call, want in calls(comm, name, every, count):
        problem = differs(call(made(me).to(ctx.device)), want.contiguous())
        if problem:
            out.append(f"{name} {how} of {note} on rank {ctx.rank} {problem}")
    return out


def joined(ctx: ParallelContext) -> Wrong:
    """Position, size, device and process group are consistent."""
    out, comm = Wrong(), ctx.comm("tp")
    if comm.position.dtype != torch.int64 or comm.position.shape != (1,):
        out.append(f"comm.position is {comm.position.dtype} {tuple(comm.position.shape)}, not one int64 element")
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
    for shape in shapes(comm.size):
        out += _each(ctx, comm, primitive, [values(shape, p, dtype) for p in range(comm.size)])
    out += _each(ctx, comm, primitive, spread(shapes(comm.size)[1], comm, primitive, dtype))
    return out


def spread(shape: tuple[int, ...], comm: Comm, primitive: str, dtype: torch.dtype) -> list[Tensor]:
    """A tensor for each member with numbers from all of the dtype's range. Bits, if they are only moved."""
    if primitive not in MOVING:
        return [wide(shape, p, dtype, comm.size) for p in range(comm.size)]
    return [bits(shape, p, dtype, normal=not comm.eager) for p in range(comm.size)]


def empty(ctx: ParallelContext, primitive: str) -> Wrong:
    comm, out = ctx.comm("tp"), Wrong()
    for dtype in eager_dtypes(ctx):
        for shape in ((0, multiple(comm.size)), (multiple(comm.size), 0)):
            out += _each(ctx, comm, primitive, [values(shape, p, dtype) for p in range(comm.size)])
    return out


def eager_dtypes(ctx: ParallelContext) -> tuple[torch.dtype, ...]:
    """All dtypes that the backend sums. float32 alone on a lazy one, which compiles a program for each."""
    return ctx.backend.capabilities.dtypes if ctx.comm("tp").eager else (torch.float32,)


def overlapped(ctx: ParallelContext) -> Wrong:
    """Several all-reduces under way, a permute and a gather. Ranks wait for them in different orders."""
    comm, out = ctx.comm("tp"), Wrong()
    n, me = comm.size, comm.position.float()  # a tensor: one program for all ranks of a compiling backend
    waits = [comm.start_all_reduce(me.repeat(9) + i) for i in range(4)]
    moved = comm.start_permute(me.repeat(9), [*range(1, n), 0])
    gathered = comm.all_gather(me, 0)
    forward = comm.eager and int(comm.position.cpu()) % 2
    for i, wait in sorted(enumerate(waits), reverse=not forward):
        problem = differs(wait(), torch.full((9,), float(n * i + n * (n - 1) // 2)))
        if problem:
            out.append(f"all-reduce {i} of 4 under way {problem}")
    if differs(moved(), ((comm.position.cpu() - 1) % n).float().repeat(9)):
        out.append("a permute under way beside all-reduces is wrong")
    if differs(gathered, torch.arange(n).float()):
        out.append("a gather between the start of an all-reduce and its wait is wrong")
    return out


def groups(ctx: ParallelContext, primitive: str) -> Wrong:
    """Collectives over one axis, several in either order, a part of them, the world: only among the group's members."""
    axes, out = list(ctx.mesh.axes), Wrong()
    tried: list[tuple[tuple[str, ...], int | None]] = [((a,), None) for a in axes] + [
        (tuple(axes[:2]), None),
        (tuple(axes), None),
    ]
    tried += [(tuple(axes[::-1]), None), (tuple(axes), 2)]
    for names, within in tried:
        comm = ctx.comm(*names, within=within)
        if comm.size == 1:
            continue
        members = ctx.mesh.group(*names, within=within).members(ctx.rank)
        at = int(comm.position.cpu())
        if comm.size != len(members) or members[at] != ctx.rank:
            out.append(f"rank {ctx.rank} is at {at} of {comm.size} in {names} group {members}")
            continue
        out += _each(ctx, comm, primitive, [values((multiple(comm.size), 4), r, torch.float32) for r in members])
    return out


def mixed(ctx: ParallelContext) -> Wrong:
    """Collectives of changing kind and size do not affect each other."""
    comm, out = ctx.comm("tp"), Wrong()
    for i in range(24):
        shape = multiple(comm.size), 4 + i % 5
        every = [values(shape, p + i, torch.float32) for p in range(comm.size)]
        out += _each(ctx, comm, PRIMITIVES[i % len(PRIMITIVES)], every)
    return out


def many(ctx: ParallelContext, method: str, count: int) -> Wrong:
    """``count`` small calls of one method: none returns the result of another, nor writes to it later."""
    comm, out = ctx.comm("tp"), Wrong()
    if not comm.eager:
        return out
    # seven inputs in turn: 7 divides no number that a counter is likely to wrap at
    n = comm.size if divides(method) else 1
    inputs = [[torch.full((n,), p + 100.0 * r) for p in range(comm.size)] for r in range(7)]
    tried = [calls(comm, method, every, 1)[0] for every in inputs]
    mine = [every[int(comm.position.cpu())].to(ctx.device) for every in inputs]
    results = [tried[i % 7][1](mine[i % 7]) for i in range(count)]
    wrong = {i: p for i, y in enumerate(results) if (p := differs(y, tried[i % 7][2]))}
    for i in sorted(wrong)[:1]:
        out.append(f"call {i + 1} of {count} {method} of {n} elements on rank {ctx.rank} {wrong[i]}")
    return out


def not_refused(call: Callable[[], None], what: str) -> list[str]:
    try:
        call()
    except BackendError:
        return []
    return [f"{what} was not refused"]
