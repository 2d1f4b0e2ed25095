"""Memory of a process: huge pages for what stays, and how the C library treats what was freed."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

_ALIGNED = 64  # bytes: a cache line, as torch aligns
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_* constants of malloc.h
_ALWAYS = 2**31 - 1
_LARGEST = (1 << 30, 32 << 20)  # bytes; older versions of glibc refuse more than 32 MB


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next tensors; with another C library nothing. Returns whether it does.
    glibc gives large blocks back to the kernel at once, so each step would map its large activations and gradients
    anew, with 15,000 page faults for 62 MB. After this call the process keeps its peak memory."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    agreed = any(mallopt(_MMAP_THRESHOLD, most) for most in _LARGEST)
    return bool(agreed and mallopt(_TRIM_THRESHOLD, _ALWAYS))


def in_huge_pages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of contiguous tensors of the host, side by side in memory for which the kernel is asked for huge pages.
    A mapped file has pages of 4 KiB on the usual file systems, and a product of few rows, which reads each weight
    once, then waits for the page table. Without huge pages in the kernel these are plain copies."""
    places, size = {}, 0
    for name, t in tensors.items():
        places[name] = size
        size += math.ceil(t.nbytes / _ALIGNED) * _ALIGNED
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    parts = {name: buffer[offset : offset + tensors[name].nbytes] for name, offset in places.items()}
    return {name: parts[name].view(t.dtype).view(t.shape).copy_(t) for name, t in tensors.items()}
