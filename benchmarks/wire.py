"""A wire between two network namespaces with a delay and a rate: what it carries goes through this process.

For kernels without tc's netem. ``python -m benchmarks.wire NAMESPACE NAMESPACE DELAY RATE`` makes a device ``eth0``
in each, prints a line when both are there, and carries frames until it is ended; seconds and bits a second.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from contextlib import suppress

_NEWNET = 0x40000000  # of <linux/sched.h>
_TUNSETIFF, _TAP, _NO_INFORMATION = 0x400454CA, 0x0002, 0x1000  # of <linux/if_tun.h>
_FRAME = 65_536


def tap(namespace: str) -> int:
    """A descriptor of a new device ``eth0`` in ``namespace``, where this thread is from now on."""
    with open(f"/run/netns/{namespace}") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP | _NO_INFORMATION))
    return fd


def carry(fds: tuple[int, int], delay: float, rate: float) -> None:
    """Forever. Each direction is a queue that sends ``rate`` bits a second; a frame arrives ``delay`` after it."""
    other = dict(zip(fds, reversed(fds), strict=True))
    free = dict.fromkeys(fds, 0.0)  # when the queue from there is empty
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for fd in select.select(fds, [], [], patience)[0]:
            frame = os.read(fd, _FRAME)
            free[fd] = max(free[fd], time.monotonic()) + len(frame) * 8 / rate
            heapq.heappush(waiting, (free[fd] + delay, count, other[fd], frame))
            count += 1
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, fd, frame = heapq.heappop(waiting)
            with suppress(OSError):  # lost: the device is not up yet
                os.write(fd, frame)


def main(one: str, two: str, delay: float, rate: float) -> None:
    fds = tap(one), tap(two)
    print("ready", flush=True)
    carry(fds, delay, rate)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
