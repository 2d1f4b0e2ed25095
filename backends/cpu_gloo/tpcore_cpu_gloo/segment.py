"""The memory that the ranks of one host share: its layout, and how ranks map each other's part. Each rank owns one
file in memory, which only it fills and the others read. The file has no name, so nothing remains however a job ends,
and the size of /dev/shm does not matter. The others open it through /proc/<pid>/fd. Memory is reserved before use,
so that a lack of memory raises an error and no SIGBUS. Ranks tell each other by POSIX semaphores in it, through the
C library, and not by flags: writes before ``sem_post`` are visible after ``sem_wait`` on every processor, also where
plain stores may be reordered (Arm), and a process can sleep on a semaphore."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from tpcore.processes.transfer import nameless_file

STRIDE = 128
"""Bytes from one semaphore to the next: two cache lines, because processors fetch lines in pairs."""
_MONOTONIC = 1  # CLOCK_MONOTONIC
_POLL = (5e-5, 1e-3)  # seconds between the first and later looks, where no sleep can be woken
_TEXT = 4096
_PIECES = 64  # of a tensor that is posted whole, at most: address space and no memory until one is
_FAILURES = (OSError, ValueError)  # mmap raises a ValueError for a file that is shorter than it should be
# two lines of words: of each second post the hashes of the call and of its place; of each buffer the bytes that its
# owner could reserve; in the first, whether its owner makes no more calls
CALL, PLACE, ROOM, LEFT = range(4)

# PyDLL keeps the interpreter's lock: releasing it costs more than these calls, and 5 ms if another thread takes it
_library = ctypes.PyDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _function(library: ctypes.CDLL, name: str, *arguments: type) -> Callable[..., int]:
    function: Callable[..., int] = getattr(library, name)
    function.argtypes = arguments  # type: ignore[attr-defined]
    return function


post_to = _function(_library, "sem_post", ctypes.c_void_p)
"""(address): increment the semaphore."""
busy = _function(_library, "sem_trywait", ctypes.c_void_p)
"""(address): decrement the semaphore and return 0, or return -1 if it is 0."""
_create = _function(_library, "sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
# glibc 2.30 has it, musl does not; sem_timedwait would follow changes of the date
_sleeping = ctypes.CDLL(None)  # releases the interpreter's lock
_clockwait: Callable[..., int] | None = None
if hasattr(_sleeping, "sem_clockwait"):
    _clockwait = _function(_sleeping, "sem_clockwait", ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))


def sleep_on(address: int, seconds: float) -> bool:
    """Sleep in the kernel until the semaphore can be decremented. False after ``seconds`` or a signal."""
    until = time.monotonic() + seconds
    if _clockwait is not None:
        when = _Timespec(int(until), int(until % 1 * 1e9))
        return _clockwait(address, _MONOTONIC, ctypes.byref(when)) == 0
    pause, longest = _POLL
    while busy(address):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
    return True


class Segment:
    """This rank's memory for one group, and its view of the peers': a head of a semaphore for each peer, two lines
    of words and a page of text, and two buffers. Of those ``room`` bytes are used, up to ``most`` for a piece and
    ``whole`` for a tensor posted whole. All address space is mapped at first, so views stay valid when more of it is
    reserved. ``lines``: the two, each with every rank's words."""

    def __init__(self, size: int, position: int, first: int, most: int) -> None:
        self.size, self.position = size, position
        self.room, self.most, self.whole = first, most, _PIECES * most
        self._distance = self.whole  # offset from one buffer to the next; ``whole`` may become smaller
        page = mmap.PAGESIZE
        self._text = page * -(-(size + 2) * STRIDE // page)
        self._head = self._text + _TEXT
        self._length = self._head + page * -(-2 * self._distance // page)
        self._own, self._maps = nameless_file(), list[mmap.mmap]()
        self._buffers: dict[torch.dtype, list[list[Tensor]]] = {}
        try:
            os.ftruncate(self._own, self._length)
            os.posix_fallocate(self._own, 0, self._head)
            self.reserve(first)
            memory = mmap.mmap(self._own, self._length)
            for peer in range(size):  # each of value 0, for several processes
                if _create(_address(memory) + peer * STRIDE, 1, 0):
                    raise OSError("this system has no semaphores in shared memory")
        except BaseException:
            self.close()
            raise

    def open(self, tickets: Sequence[str]) -> None:
        """Map all ranks' files, once all ranks have made theirs. ``tickets``: their paths below /proc."""
        for ticket in tickets:
            fd = os.open(f"/proc/{ticket}", os.O_RDWR)
            try:
                self._maps.append(mmap.mmap(fd, self._length))
            finally:
                os.close(fd)
        me, bases = self.position, [_address(m) for m in self._maps]
        peers = [p for p in range(self.size) if p != me]
        self.posts = [bases[me] + p * STRIDE for p in peers]
        self.waits = [(p, bases[p] + me * STRIDE) for p in peers]
        starts, far = [line * STRIDE for line in (self.size, self.size + 1)], self._distance
        self.lines = [[memoryview(m)[at : at + STRIDE].cast("Q") for m in self._maps] for at in starts]
        with torch.inference_mode(False):  # inference tensors cannot be written outside of inference mode
            whole = [torch.frombuffer(m, dtype=torch.uint8)[self._head :] for m in self._maps]
            self._bytes = [[w[b * far : (b + 1) * far] for w in whole] for b in (0, 1)]

    def write(self, text: bytes) -> None:
        self._maps[self.position][self._text : self._text + _TEXT] = text[:_TEXT].ljust(_TEXT)

    def texts(self) -> list[bytes]:
        return [m[self._text : self._text + _TEXT] for m in self._maps]

    def reserve(self, room: int) -> None:
        """Reserve memory for ``room`` bytes of both buffers; OSError if there is too little."""
        for buffer in (0, 1):
            os.posix_fallocate(self._own, self._head + buffer * self._distance, room)

    def buffers(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """[buffer][rank]: a full buffer as one row, of which ``room`` bytes may be used."""
        if dtype not in self._buffers:
            with torch.inference_mode(False):
                self._buffers[dtype] = [[t.view(dtype) for t in b] for b in self._bytes]
        return self._buffers[dtype]

    def close(self) -> None:
        """Close the file. The memory is unmapped when the last view of it is gone."""
        self._buffers.clear()
        if self._own >= 0:
            os.close(self._own)
        self._own = -1


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def shared(
    size: int, position: int, limits: tuple[int, int], exchange: Callable[[str], Sequence[str]], refusal: str = ""
) -> Segment | list[str]:
    """A segment that all members have mapped, or for each member the reason why it cannot ("" if it can).
    Collective; all members succeed or none. ``limits``: bytes of a buffer at first and at most. ``exchange`` gathers
    the members' texts. ``refusal``: the reason if this rank must not share memory."""
    segment, reason = None, refusal
    try:
        segment = None if refusal else Segment(size, position, *limits)
    except _FAILURES as e:
        reason = str(e)
    tickets = exchange("" if segment is None else f"{os.getpid()}/fd/{segment._own}")
    try:
        if segment is not None and all(tickets):
            segment.open(tickets)
    except _FAILURES as e:
        reason = str(e)
    reasons = list(exchange(reason))
    if segment is not None and not any(reasons):
        return segment
    if segment is not None:
        with suppress(OSError):
            segment.close()
    return reasons
