"""The conformance kit's check of memory that is freed."""

from __future__ import annotations

import ctypes
import gc
import sys
from itertools import pairwise, product

import torch

from .collectives import PRIMITIVES, calls
from .rank import RankCheck, check


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
        for _ in range(5):
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
