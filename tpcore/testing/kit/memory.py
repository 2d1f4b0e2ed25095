"""The conformance kit's checks of memory: what is read, written, new, kept, used again and freed."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product

import torch
from torch import Tensor

from .collectives import PRIMITIVES, RankCheck, calls, check, shapes
from .samples import values

floats = partial(values, dtype=torch.float32)


def _inputs(t: RankCheck) -> Iterator[tuple[str, list[Tensor]]]:
    """Tensors of all members; lazy backends, which compile a program for each, get the first alone."""
    every = t.every(partial(floats, shapes(t.size)[2]))
    yield "", every
    if t.comm.eager:
        yield " of a transposed tensor", [x.transpose(0, 2) for x in every]
        # the result is equal to one member's input: a reason to return it as it is
        yield " of zeros on all other ranks", [every[0], *[torch.zeros_like(x) for x in every[1:]]]


@check
def memory(t: RankCheck, primitive: str) -> None:
    """A failure is in this primitive's use of memory: its input stays unchanged; its output is contiguous, new, outside
    of autograd, and stays valid."""
    donated = "donate" in primitive
    kept: list[tuple[str, Tensor, Tensor]] = []
    for note, every in _inputs(t):
        for how, call, want in t.calls(primitive, every):
            x = every[t.me].clone().to(t.ctx.device, copy=True).requires_grad_(not donated)
            y = call(x)
            what = f"{primitive} {how}{note}"
            t.expect(y.is_contiguous(), f"{what}: the output is not contiguous, its strides are {y.stride()},")
            if not donated:
                t.same(f"{what}: the input afterwards", x, every[t.me])
                new = not y.numel() or y.data_ptr() != x.data_ptr() or x.data_ptr() == 0  # 0: lazy
                t.expect(new, f"{what}: the output is the input's memory")
            t.expect(not y.requires_grad, f"{what}: the output is in an autograd graph, whose gradient would be wrong,")
            kept.append((what, y, want))
    for what, y, want in kept:  # after all calls: a reused buffer would have later values by now
        t.same(f"{what}: after later collectives the output", y, want)


@check
def freed(t: RankCheck) -> None:
    """A failure is in memory that stays in use after its result is dropped: any of large ones, half a kilobyte of a
    small call."""
    if t.ctx.device.type != "cpu" or not t.comm.eager or _allocated() is None:
        return
    gc.collect()
    frozen = gc.get_freeze_count()
    gc.freeze()  # a collection passes over what is there now, and takes no time: without it garbage looks kept
    for primitive, (n, turns) in product(PRIMITIVES, ((1 << 14, 32), (4 * t.size, 100))):
        x = torch.ones(n - n % t.size, device=t.ctx.device)
        most = max(x.nbytes // 2, turns * 512)  # of 32 large results half of one
        _, call, _ = calls(t.comm, primitive, [x] * t.size, 1)[0]
        seen: list[int] = []
        for _ in range(3):
            for _ in range(turns):
                call(x.clone())
            gc.collect()
            seen.append(_allocated() or 0)
        # what grows in every round: buffers, and ranks in the same process, take their share in some of them
        grown = min(after - before for before, after in pairwise(seen))
        what = f"{turns} calls of {x.nbytes} bytes, whose results were dropped,"
        t.expect(grown <= most, f"{primitive}: {what} have left {grown} bytes in use")
    if not frozen:
        gc.unfreeze()


class _Mallinfo2(ctypes.Structure):
    """<malloc.h>, from glibc 2.33 on: the fifth number is ``hblkhd``, the eighth ``uordblks``."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def _allocated() -> int | None:
    """Bytes in use by glibc's and Python's allocators (64 a small object); None where the C library does not tell."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _Mallinfo2
    numbers = mallinfo().numbers
    return int(numbers[4] + numbers[7]) + 64 * sys.getallocatedblocks()
