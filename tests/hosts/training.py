"""The program of the drills: it goes on from the last checkpoint, on any mesh, and saves at every step."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.pipelines import batch_of, cut, share_of

import tpcore
from tpcore import Mesh, checkpoint
from tpcore.checkpoint.write import save as writing
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

LAYERS, BATCH = 6, 12  # for 1, 2 and 3 stages; for dp up to 3, in two microbatches


def train(ctx: ParallelContext, home: Path, steps: int, told: int = -1, in_background: bool = False) -> None:
    """Up to step ``steps``. Rank 0 writes the loss of each, and a byte into the pipe ``home/told``
    when it has made step ``told``. ``in_background``: each step is saved while the next one is made."""
    tpcore.random.manual_seed(0)
    model = cut(LAYERS, ctx)
    model.layers = tpcore.PipelinedLayers(model.layers, 2, shared=["mix"])
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    first, path = 0, checkpoint.latest(home / "run")
    if path is not None:
        rest = checkpoint.load(path, model)
        optimizer.load_state_dict(rest["optimizer"])
        first = rest["step"] + 1
    for step in range(first, steps):
        optimizer.zero_grad()
        loss = model(**share_of(batch_of(BATCH, step), ctx))
        loss.backward()
        tpcore.optimizer_step(optimizer, max_norm=1.0)
        mean = ctx.comm("dp").all_reduce(loss.detach().reshape(1)) / ctx.comm("dp").size
        if ctx.rank == 0:
            with open(home / "losses", "a") as f:
                f.write(json.dumps([step, float(mean)]) + "\n")
            if step == told:
                (home / "told").write_bytes(b"x")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        checkpoint.save(state, home / "run" / f"step_{step}", background=in_background, keep_last=2)
    checkpoint.wait()


def undisturbed(home: Path, steps: int) -> dict[int, float]:
    """The losses of a run of so many steps, on one rank."""
    home.mkdir()
    run_ranks(Mesh({"pp": 1, "dp": 1, "tp": 1}), lambda ctx: train(ctx, home, steps))
    return losses(home)


def rank(home: str, axes: Mapping[str, int], steps: int, told: int, stuck: int | None = None) -> None:
    """As a script would: every launcher's variables are set. ``stuck``: saves are made in the background, and
    that of step ``told`` stays unfinished, because this rank never writes its part; the rank then writes the
    byte into ``home/told``."""
    os.fsync = lambda fd: None  # no power is cut, and disks of test machines are slow
    ctx = tpcore.init("cpu_gloo", **axes)
    if stuck == ctx.rank:
        _never_write(Path(home), f".step_{told}.")
    train(ctx, Path(home), steps, told if stuck is None else -1, stuck is not None)
    tpcore.shutdown()


def _never_write(home: Path, of: str) -> None:
    """From the save on whose directory's name begins with ``of``."""
    real = writing.write_tensors

    def write_tensors(file: str, *args: Any) -> Any:
        if of in file:
            (home / "told").write_bytes(b"x")
            threading.Event().wait()
        return real(file, *args)

    writing.write_tensors = write_tensors


def losses(home: Path) -> dict[int, float]:
    """By step. One that was made again, from a checkpoint, has given the same again, to 1e-9: meshes
    differ in the order of their sums in float64, which AdamW divides by small roots."""
    found: dict[int, float] = {}
    for line in (home / "losses").read_text().splitlines():
        step, loss = json.loads(line)
        assert abs(found.setdefault(step, loss) - loss) < 1e-9
    return found
