"""How the C library treats memory that a process has freed."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_* constants of malloc.h
_ALWAYS = 2**31 - 1
_LARGEST = (1 << 30, 32 << 20)  # bytes; older versions of glibc refuse more than 32 MB


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next tensors; does nothing with another C library.

    glibc gives large blocks back to the kernel at once, so each step maps its large activations and
    gradients anew: a fresh gradient of 62 MB costs 15,000 page faults. After this call the process keeps
    its peak memory. Returns whether the C library accepted the setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    agreed = any(mallopt(_MMAP_THRESHOLD, most) for most in _LARGEST)
    return bool(agreed and mallopt(_TRIM_THRESHOLD, _ALWAYS))
