"""Ways in which a rank ends or stops, places at which it does, and what the others are to say of it."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpcore.comm.transport import Transport
from tpcore.errors import BackendError, PeerLostError
from tpcore.runtime.context import ParallelContext
from tpcore_cpu_gloo import GlooBackend


def _raise() -> None:
    raise OSError("disk on fire")


ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was killed by SIGKILL|is gone"),
    "exits": (lambda: os._exit(0), r"exited with status 0|is gone"),
    "fails": (lambda: os._exit(7), r"exited with status 7|is gone"),
    "raises": (_raise, r"raised OSError: disk on fire"),
    "leaves": (lambda: sys.exit(7), r"called sys\.exit\(7\)"),
}
"""How, and what the others say."""


STOPPED = "stopped"


def end(how: str) -> None:
    if how == STOPPED:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        ENDS[how][0]()


def names(text: str, rank: int, how: str) -> bool:
    """Whether an error's text says that this rank ended, or was stopped, in this way."""
    if how == STOPPED:
        where = "which (did not come|came and did not finish)"
        return bool(re.search(rf"waits for rank {rank}, {where} \(pid \d+ on .* is stopped", text))
    return bool(re.match(rf"rank {rank} \(pid \d+ on .*\) ({ENDS[how][1]})", text))


def on_open(folder: str, ending: Callable[[], object]) -> None:
    """End this rank at the next file that it opens in ``folder``."""
    armed = [True]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if armed and event == "open" and str(args[0]).startswith(folder):
            armed.clear()
            ending()

    sys.addaudithook(hook)


def said(kind: type[Exception], call: Callable[[], object]) -> str:
    """What an error of this kind says that ``call`` raises."""
    try:
        call()
    except kind as e:
        return str(e)
    return "no error"


# -- at a step of a collective ------------------------------------------------------------------------------
class Tiny(GlooBackend):
    """Buffers that grow soon and hold little: nearly all goes in pieces."""

    buffers = (64, 256)


STEPS: dict[str, dict[str, tuple[str, int, bool]]] = {
    "shared memory": {
        "buffer filled, not posted": ("post", 0, True),
        "posted, not read": ("take", 0, True),
        "between two pieces": ("post", 1, True),
        "between two calls": ("post", 3, True),
    },
    "gloo": {
        "before the call": ("_enter", 0, True),
        "call announced, not begun": ("_enter", 0, False),
        "begun, not waited for": ("finish", 0, True),
        "between two calls": ("finish", 0, False),
    },
}
"""By road: a method of the protocol, how many of its calls go by before, and whether its begin or its end."""


def _arm(transport: Transport, step: str, ending: Callable[[], object]) -> None:
    """``ending`` is called when this rank comes to that step."""
    shared = repr(transport) == "shared memory"
    name, skip, before = STEPS["shared memory" if shared else "gloo"][step]
    owner: Any = transport._exchange if shared else transport  # type: ignore[attr-defined]
    real, left = getattr(owner, name), [skip]

    def method(*args: object) -> None:
        left[0] -= 1
        if before and left[0] == -1:
            ending()
        real(*args)
        if not before and left[0] == -1:
            ending()

    setattr(owner, name, method)


def ends_at(ctx: ParallelContext, how: str, step: str, folder: str) -> tuple[str, float]:
    """The last rank ends, or is stopped, at a step of a sum. What another says, and seconds until it did."""
    comm = ctx.comm("tp")
    pid = int(comm.all_gather(torch.tensor([os.getpid()]), 0)[-1])
    comm.all_reduce(torch.ones(64))
    ended = Path(folder) / "ended"

    def ending() -> None:
        ended.write_text(str(time.monotonic()))  # one clock for all processes
        end(how)

    if ctx.rank == comm.size - 1:
        _arm(comm.transport, step, ending)
    try:
        for _ in range(8):
            comm.all_reduce(torch.ones(128))
    except BackendError as e:
        seconds = time.monotonic() - float(ended.read_text())
        if how == STOPPED and ctx.rank < comm.size - 1:
            _go_on_when_all_know(ctx.rank, comm.size - 1, pid, Path(folder))
        return str(e), seconds
    return "no error", 0.0


def _go_on_when_all_know(rank: int, others: int, pid: int, folder: Path) -> None:
    (folder / f"knows{rank}").touch()
    while rank == 0 and len(list(folder.glob("knows*"))) < others:
        time.sleep(0.01)
    if rank == 0:
        os.kill(pid, signal.SIGCONT)


def waits_in_a_chain(ctx: ParallelContext, known: str) -> str:
    """What a rank of dp x tp = 2 x 2 is told: rank 2 waits for rank 3 over tp, rank 1 over dp, and rank 0 for rank 1
    over tp, which stays until rank 0 has its error: in vain."""
    comm = ctx.comm("tp" if ctx.rank in (0, 2) else "dp")
    text = said(PeerLostError, lambda: comm.all_reduce(torch.ones(1)))
    while ctx.rank and not Path(known).exists():
        time.sleep(0.01)
    Path(known).touch()
    return text
