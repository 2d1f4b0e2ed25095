"""A save that kills its process at one of its steps, and what is there then. Imports no pytest: processes import it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tpcore.checkpoint import load, save, wait
from tpcore.checkpoint.storage import files
from tpcore.checkpoint.storage import publish as staging
from tpcore.checkpoint.write import background
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

EVENTS = ("open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "fcntl.flock", "ctypes.dlsym")


class Steps:
    """Counts what this process does on the file system, and kills it at one of them.

    Steps are what an audit hook sees (open, mkdir, rename, remove, rmtree, flock, ctypes' call of
    renameat2) and what has no audit event: fsync and write.
    """

    def __init__(self, home: str, stop: int) -> None:
        self.count, self._home, self._stop, self._on = 0, home, stop, True

    def step(self) -> None:
        if self._on:
            self.count += 1
            if self.count == self._stop:
                os.kill(os.getpid(), signal.SIGKILL)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._on and event in EVENTS and (event != "open" or self._home in str(args[0])):
            self.step()

    def opened(self, path: str, mode: str) -> Any:
        f = open(path, mode)  # noqa: SIM115  whoever opens it closes it
        return Counted(f, self.step) if "x" in mode else f

    def end(self) -> None:
        self._on = False  # an audit hook stays for ever


class Counted:
    """A file of which every write is two, and a step between them."""

    def __init__(self, file: Any, step: Callable[[], None]) -> None:
        self._file, self._step = file, step

    def write(self, data: bytes) -> int:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._step()
        return half + int(self._file.write(data[half:]))

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def state(ctx: ParallelContext, version: int) -> dict[str, Any]:
    rank = torch.tensor([ctx.rank, version])
    return {"model": {"w": torch.full((3,), float(version))}, "more": {"v": rank}, "n": version}


def version(path: Path) -> int:
    """The version that is there, all of it the same, on both ranks."""

    def read(ctx: ParallelContext) -> int:
        there = load(path)
        assert float(there["model"]["w"].sum()) == 3 * there["n"]
        assert there["more"]["v"].tolist() == [ctx.rank, there["n"]]
        return int(there["n"])

    (found,) = set(run_ranks(Mesh({"tp": 2}), read))
    return found


def killed(ctx: ParallelContext, home: str, how: str, victim: int, stop: int) -> int:
    """Save version 2, dying at step ``stop`` if this is the victim; the number of steps."""
    steps = Steps(home, stop if ctx.rank == victim else 0)
    sys.addaudithook(steps.hook)
    exchange = staging._exchange
    with ExitStack() as undo:
        undo.callback(steps.end)
        replace(undo, os, "fsync", lambda fd: steps.step())
        replace(undo, files, "open", steps.opened)
        replace(undo, background, "_PATIENCE", 1.0)  # for a rank that will never say anything
        if how == "no exchange":
            replace(undo, staging, "_exchange", lambda a, b: False)
        else:
            replace(undo, staging, "_exchange", lambda a, b: (steps.step(), exchange(a, b))[1])
        save(state(ctx, 2), os.path.join(home, "c"), background=how == "async")
        wait()
    return steps.count


def replace(undo: ExitStack, module: Any, name: str, value: Any) -> None:
    undo.callback(setattr, module, name, getattr(module, name, open))
    setattr(module, name, value)
