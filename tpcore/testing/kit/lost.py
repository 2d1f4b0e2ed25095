"""The conformance kit's checks of lost ranks: jobs of two ranks of their own, of which one is lost.

The first process of the kit starts them, because a job in which a rank is lost ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...backend.interface import Backend
from ...context import ParallelContext
from ...errors import CollectiveTimeoutError, PeerLostError
from ...init import init
from ...processes.spawn import rank_environment
from .collectives import Wrong

TIMEOUT = 5.0
"""Seconds that a collective of these jobs may wait."""
WAYS: Mapping[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "gone": lambda: os._exit(0),
    "late": lambda: time.sleep(1e6),
}
"""What becomes of the last rank."""
_CODE = "import sys; sys.path[:] = {path!r}; from tpcore.testing.kit.lost import rank; rank(*sys.argv[1:])"


def lost(ctx: ParallelContext, kind: type[Backend], way: str, patience: float, slack: float = 20.0) -> Wrong:
    """The rank that is left gets an error that says so. ``patience``: seconds for the two ranks to start.
    ``slack``: seconds for the error, beyond the time-out."""
    out, right = Wrong(), "PeerLostError or CollectiveTimeoutError"
    if ctx.rank:
        return out
    with tempfile.TemporaryDirectory() as name, _two_ranks(kind, way, Path(name)) as first:
        begun, ends = Path(name) / "begun", Path(name) / "ends"
        if not _appears(begun, patience, first):
            status = first.poll()
            end = f"in {patience:g} s" if status is None else f"and rank 0 ended with status {status}"
            what = f"with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set made no sum {end}"
            out.append(
                f"two processes {what}: set starts = False if a launcher has to start them\n"
                + (Path(name) / "stderr").read_text()[-4000:]
            )
        elif not _appears(ends, TIMEOUT + slack, first):
            status = first.poll()
            what = "waits for ever" if status is None else f"ended with status {status}"
            out.append(f"rank 1 is {way}, and rank 0 {what}: start(timeout={TIMEOUT:g}) promises {right}")
        elif said := ends.read_text():
            out.append(f"rank 1 is {way}, and rank 0 {said}: it has to get {right}")
    return out


@contextmanager
def _two_ranks(kind: type[Backend], way: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of rank 0."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    path = [p or os.getcwd() for p in sys.path]
    (folder / "kind").write_bytes(pickle.dumps(kind))
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", _CODE.format(path=path), str(folder), way]  # and the rank
    with (folder / "stderr").open("w") as said:
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": said, "stdin": subprocess.DEVNULL}
        ranks = [
            subprocess.Popen([*command, str(r)], env=rank_environment(r, 2, job), **quiet) for r in range(2)
        ]
    try:
        yield ranks[0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _appears(path: Path, seconds: float, process: subprocess.Popen[bytes]) -> bool:
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until or process.poll() is not None:
            return path.exists()
        time.sleep(0.05)
    return True


def rank(folder: str, way: str, number: str) -> None:
    """Rank ``number`` of such a job: the second is lost, the first writes what it gets."""
    kind: type[Backend] = pickle.loads((Path(folder) / "kind").read_bytes())
    _meet(folder, int(number))
    ctx = init(backend=kind(), tp=2, timeout=TIMEOUT)
    comm, x = ctx.comm("tp"), torch.ones(4, device=ctx.device)
    comm.all_reduce(x)
    if ctx.rank:
        WAYS[way]()
    _write(folder, "begun", "")
    _write(folder, "ends", _outcome(lambda: comm.all_reduce(x).tolist()))
    os._exit(0)


def _meet(folder: str, number: int) -> None:
    """Wait for the other rank. Imports take seconds, not the same in both on a busy machine, and the time-out
    is short."""
    names = [f"here{r}" for r in range(2)]
    _write(folder, names[number], "")
    while not all((Path(folder) / name).exists() for name in names):
        time.sleep(0.01)


def _outcome(call: Callable[[], Sequence[float]]) -> str:
    try:
        return f"got {call()} from it"
    except (PeerLostError, CollectiveTimeoutError) as e:
        return "" if str(e) else f"got an {type(e).__name__} without a message"
    except Exception as e:  # noqa: BLE001  any error but the right one is a finding
        return f"got {type(e).__name__}: {e}"


def _write(folder: str, name: str, text: str) -> None:
    made = Path(folder) / f".{name}"
    made.write_text(text)
    made.rename(Path(folder) / name)
