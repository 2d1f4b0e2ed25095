"""POSIX semaphores in shared memory, through the C library: no compiler is needed. Semaphores and not flags: writes
before ``sem_post`` are visible after ``sem_wait`` on every processor, also where plain stores may be reordered
(Arm), and a process can sleep on a semaphore."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache

STRIDE = 128
"""Bytes from one semaphore to the next: two cache lines, because processors fetch lines in pairs."""
_MONOTONIC = 1  # CLOCK_MONOTONIC

# PyDLL keeps the interpreter's lock: releasing it costs more than these calls, and 5 ms if another thread takes it
_library = ctypes.PyDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _function(library: ctypes.CDLL, name: str, *arguments: type) -> Callable[..., int]:
    found: Callable[..., int] = getattr(library, name)
    found.argtypes = arguments  # type: ignore[attr-defined]
    return found


post = _function(_library, "sem_post", ctypes.c_void_p)
"""(address): increment the semaphore."""
busy = _function(_library, "sem_trywait", ctypes.c_void_p)
"""(address): decrement the semaphore and return 0, or return -1 if it is 0."""
_init = _function(_library, "sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)


def create(address: int) -> None:
    """Initialize a semaphore of value 0 for several processes."""
    if _init(address, 1, 0):
        raise OSError("this system has no semaphores in shared memory")


def take(address: int, seconds: float) -> bool:
    """Sleep in the kernel until the semaphore can be decremented. False after ``seconds`` or a signal."""
    until = time.monotonic() + seconds
    when = _Timespec(int(until), int(until % 1 * 1e9))
    clockwait = _clockwait()
    if clockwait is None:
        return _polled(address, until)
    return clockwait(address, _MONOTONIC, ctypes.byref(when)) == 0


@cache
def _clockwait() -> Callable[..., int] | None:
    """``sem_clockwait``: glibc 2.30 has it, musl does not. sem_timedwait would follow changes of the date."""
    library = ctypes.CDLL(None)  # releases the interpreter's lock while it sleeps
    if not hasattr(library, "sem_clockwait"):
        return None
    return _function(library, "sem_clockwait", ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))


def _polled(address: int, until: float) -> bool:
    pause = 5e-5
    while busy(address):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, 1e-2)
    return True
