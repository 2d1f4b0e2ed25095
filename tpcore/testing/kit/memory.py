"""The conformance kit's checks of memory: what is read, written, new, kept, used again and freed."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from itertools import pairwise, product

import torch
from torch import Tensor

from ...comm.comm import Comm
from ...runtime.context import ParallelContext
from .collectives import PRIMITIVES, Wrong, calls, differs, only, shapes
from .samples import multiple, values


def strided(ctx: ParallelContext, primitive: str) -> Wrong:
    """The input is transposed and has gaps between its elements."""
    comm, out = ctx.comm("tp"), Wrong()
    me, shape = int(comm.position.cpu()), shapes(comm.size)[2]
    every = [values(shape, p, torch.float32).transpose(0, 2)[:, ::2] for p in range(comm.size)]
    for how, call, want in calls(comm, primitive, every):
        whole = values(shape, me, torch.float32).to(ctx.device)
        got = call(whole.transpose(0, 2)[:, ::2])
        if problem := differs(got, want.contiguous()):
            out.append(f"{primitive} {how} of a strided tensor on rank {ctx.rank} {problem}")
        between = values(shape, me, torch.float32).transpose(0, 2)[:, 1::2]
        if differs(whole.transpose(0, 2)[:, 1::2], between):
            out.append(f"{primitive} {how} wrote between the elements of its input on rank {ctx.rank}")
    return out


def _inputs(comm: Comm) -> Iterator[tuple[str, list[Tensor]]]:
    """Tensors of all members; lazy backends, which compile a program for each, get the first alone."""
    every = [values(shapes(comm.size)[2], p, torch.float32) for p in range(comm.size)]
    yield "", every
    if comm.eager:
        yield " of a transposed tensor", [t.transpose(0, 2) for t in every]
        # the result is equal to one member's input: a reason to return it as it is
        yield " of zeros on all other ranks", [every[0], *[torch.zeros_like(t) for t in every[1:]]]


def memory(ctx: ParallelContext, primitive: str) -> Wrong:
    """Inputs stay unchanged. Outputs are contiguous, new memory, outside of autograd, and stay valid."""
    comm, out = ctx.comm("tp"), Wrong()
    me, donated = int(comm.position.cpu()), "donate" in primitive
    kept: list[tuple[str, Tensor, Tensor]] = []
    for note, every in _inputs(comm):
        for how, call, want in calls(comm, primitive, every):
            x = every[me].clone().to(ctx.device, copy=True).requires_grad_(not donated)
            y = call(x)
            what = f"{primitive} {how}{note} on rank {ctx.rank}:"
            if not y.is_contiguous():
                out.append(f"{what} the output is not contiguous, its strides are {y.stride()}")
            if not donated and differs(x, every[me]):
                out.append(f"{what} the input was changed")
            if not donated and y.numel() and y.data_ptr() == x.data_ptr() != 0:  # 0: lazy
                out.append(f"{what} the output is the input's memory")
            if y.requires_grad:
                out.append(f"{what} the output is part of an autograd graph, whose gradient would be wrong")
            kept.append((what, y, want))
    for what, y, want in kept:  # after all calls: a reused buffer would have later values by now
        if problem := differs(y, want):
            out.append(f"{what} after later collectives the output {problem}")
    return out


def donated(ctx: ParallelContext) -> Wrong:
    """Donated memory ends where the tensor ends, and not where its storage does."""
    comm, out = ctx.comm("tp"), Wrong()
    for n in (8, 5_000):
        whole = torch.ones(n + 16, device=ctx.device)
        got = comm.all_reduce(whole[8:-8], donate=True)
        if problem := differs(got, torch.full((n,), float(comm.size))):
            out.append(f"all_reduce donate of a slice of {n} elements on rank {ctx.rank} {problem}")
        if not bool((torch.cat([whole[:8], whole[-8:]]) == 1).all()):
            out.append(f"all_reduce donate of a slice of {n} elements wrote beside it on rank {ctx.rank}")
    return out


def odd_memory(ctx: ParallelContext, primitive: str) -> Wrong:
    """Inputs with a storage offset, and inputs with strides of 0."""
    comm = ctx.comm("tp")
    k = multiple(comm.size)

    def placed(t: Tensor) -> Tensor:  # a copy to a device must not lose the strides
        return t if ctx.device.type == "cpu" else t.to(ctx.device)

    out = only(ctx, comm, primitive, lambda p: placed(values((k + 1, k), p, torch.float32)[1:]), "a slice")
    if primitive != "all_reduce donate":  # memory with repeated elements cannot be donated
        note = "a tensor with strides of 0"
        out += only(ctx, comm, primitive, lambda p: placed(values((1, k), p, torch.float32).expand(k, k)), note)
    return out


def again(ctx: ParallelContext, primitive: str) -> Wrong:
    """Calls like an earlier one: other values, shapes, dtypes or strides. All results stay valid."""
    comm, out = ctx.comm("tp"), Wrong()
    me, k, kept = int(comm.position.cpu()), multiple(comm.size), []
    kinds = [((k, k), torch.float32), ((k, k), torch.int64), ((k, 2 * k), torch.float32), ((2 * k, k), torch.float32)]
    for turn in range(2):
        for shape, dtype in kinds:
            if dtype not in ctx.backend.capabilities.dtypes:
                continue
            every = [values(shape, p + 5 * turn, dtype) for p in range(comm.size)]
            for how, call, want in calls(comm, primitive, every, 2):
                kept.append((f"{how} of {dtype} {shape}", call(every[me].to(ctx.device, copy=True)), want))
    if comm.eager and "donate" not in primitive:
        every = [values((k, k), p, torch.float32) for p in range(comm.size)]
        x = every[me].to(ctx.device, copy=True)
        for turned in (False, True):
            seen = [t.t() if turned else t for t in every]
            for how, call, want in calls(comm, primitive, seen, 2):
                kept.append((f"{how} of memory with other strides", call(x.t() if turned else x), want))
    for what, got, want in kept:
        if problem := differs(got, want):
            out.append(f"{primitive} {what} after calls like it on rank {ctx.rank} {problem}")
    return out


def any_mode(ctx: ParallelContext, primitive: str) -> Wrong:
    """A call that was first made under inference_mode works outside of it, and the reverse."""
    comm, out = ctx.comm("tp"), Wrong()
    me, k = int(comm.position.cpu()), multiple(comm.size)
    for inside, times in ((True, 3), (False, 3), (True, 3), (False, 5), (True, 5)):
        every = [values((k, times * k), p, torch.float32) for p in range(comm.size)]
        for how, call, want in calls(comm, primitive, every, 2):
            with torch.inference_mode(inside):
                got = call(every[me].to(ctx.device, copy=True))
            problem = differs(got, want)
            if not inside:
                got += 1  # an inference tensor could not be changed here
            if problem:
                out.append(f"{primitive} {how}, inference_mode({inside}), on rank {ctx.rank} {problem}")
    return out


def freed(ctx: ParallelContext) -> Wrong:
    """Memory of dropped results is free: of large ones all, of a small call all but half a kilobyte."""
    comm, out = ctx.comm("tp"), Wrong()
    if ctx.device.type != "cpu" or not comm.eager or _allocated() is None:
        return out
    for primitive, (n, turns) in product(PRIMITIVES, ((1 << 14, 32), (4 * comm.size, 100))):
        x = torch.ones(n - n % comm.size, device=ctx.device)
        most = max(x.nbytes // 2, turns * 512)  # of 32 large results half of one
        _, call, _ = calls(comm, primitive, [x] * comm.size, 1)[0]
        seen: list[int] = []
        for _ in range(3):
            for _ in range(turns):
                call(x.clone())
            if seen and (_allocated() or 0) - seen[-1] > most:
                gc.collect()  # takes long, and is rarely needed
            seen.append(_allocated() or 0)
        # what grows in every round: buffers, and ranks in the same process, take their share in some of them
        grown = min(after - before for before, after in pairwise(seen))
        if grown > most:
            what = f"{turns} calls of {x.nbytes} bytes, whose results were dropped,"
            out.append(f"{primitive}: {what} have left {grown} bytes in use on rank {ctx.rank}")
    return out


class _Mallinfo2(ctypes.Structure):
    """<malloc.h>, from glibc 2.33 on: the fifth number is ``hblkhd``, the eighth ``uordblks``."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def _allocated() -> int | None:
    """Bytes in use by glibc's and Python's allocators (64 a small object); None where the C library does not tell."""
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is None:
        return None
    found.restype = _Mallinfo2
    numbers = found().numbers
    return int(numbers[4] + numbers[7]) + 64 * sys.getallocatedblocks()
