"""The program of the drills: it goes on from the last checkpoint, on any mesh, and saves at every step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from pipelines import batch_of, cut, share_of

import tpcore
from tpcore import checkpoint
from tpcore.context import ParallelContext

LAYERS, BATCH = 6, 8  # for 1, 2 and 3 stages; for dp up to 2, in two microbatches


def train(ctx: ParallelContext, home: Path, steps: int, told: int = -1) -> None:
    """Up to step ``steps``. Rank 0 writes the loss of each, and a byte into the pipe ``home/told``
    when it has made step ``told``."""
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
        checkpoint.save(state, home / "run" / f"step_{step}", keep_last=2)


def rank(home: str, axes: Mapping[str, int], steps: int, told: int) -> None:
    """As a script would: every launcher's variables are set."""
    os.fsync = lambda fd: None  # no power is cut, and disks of test machines are slow
    ctx = tpcore.init("cpu_gloo", **axes)
    train(ctx, Path(home), steps, told)
    tpcore.shutdown()


def losses(home: Path) -> dict[int, float]:
    """By step. One that was made again, from a checkpoint, has given the same again, to 1e-9: meshes
    differ in the order of their sums in float64, which AdamW divides by small roots."""
    found: dict[int, float] = {}
    for line in (home / "losses").read_text().splitlines():
        step, loss = json.loads(line)
        assert abs(found.setdefault(step, loss) - loss) < 1e-9
    return found
