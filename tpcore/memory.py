"""What the C library does with memory that a process has freed."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_ALWAYS = 2**31 - 1
_LARGEST = (1 << 30, 32 << 20)  # bytes; older versions of glibc refuse more than 32 MB


def keep_freed_memory() -> bool:
    """Keep memory that tensors have freed for the next ones, where the C library is glibc; else do nothing.

    glibc gives large blocks back to the kernel at once, so that each step maps its large activations and
    gradients anew: a fresh gradient of 62 MB costs 15,000 page faults. From this call on the process keeps
    what it has had at its peak. Returns whether the C library agreed.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    agreed = any(mallopt(_MMAP_THRESHOLD, most) for most in _LARGEST)
    return bool(agreed and mallopt(_TRIM_THRESHOLD, _ALWAYS))
