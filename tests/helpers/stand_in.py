"""Ranks on the stand-in for Neuron, under its limits or without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import Context
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.rank_pool import RankPool
from tpcore import ParallelContext
from tpcore.c10d.backend import C10dBackend
from tpcore.runtime.context import enter_process, leave_process
from tpcore_neuron import NativeBackend
from tpcore_neuron.settings import LIMITS
from tpcore_neuron.stand_in.device import install
from tpcore_neuron.stand_in.limits import SDK

UNDER, FREE = ({"env": {LIMITS.name: value}} for value in (SDK, "none"))
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32 through two layers, sums in another order


@pytest.fixture(scope="module", name="ranks")
def ranks_on_the_stand_in() -> Iterator[RankPool]:
    with RankPool(8, backend=NativeBackend) as pool:
        yield pool


def counted(ctx: ParallelContext) -> dict[str, int]:
    """What is refused in this run from now on, while it runs: with the limits off all that torch's groups can do is
    asked for."""
    if not LIMITS.get():
        can = C10dBackend.capabilities
        ctx.backend.capabilities = replace(can, dtypes=NativeBackend.capabilities.dtypes)  # type: ignore[misc]
    refused: Any = install().limits.refused
    refused.clear()
    return refused


def as_after_init(ctx: ParallelContext, fn: Any, *args: Any) -> Any:
    """The context as a program has it, which calls ``tpcore.init``; the pool enters it for a block."""
    torch._dynamo.reset()
    enter_process(ctx)
    try:
        return Context().run(fn, ctx, *args)
    finally:
        leave_process()
