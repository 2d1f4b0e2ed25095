"""Pipelines on replicas: one program for all stages, and as many programs whatever the microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelines import assert_same_gradients, batch_of, cut, plain
from tpcore_neuron.testing import programs, run_replicas

import tpcore


def on_stages(pp: int, tp: int, fn: Any, *args: Any) -> list[Any]:
    return run_replicas(_with_context, pp * tp, pp, tp, fn, args)


def _with_context(pp: int, tp: int, fn: Any, args: tuple[Any, ...]) -> Any:
    ctx = tpcore.init(backend="neuron", tp=tp, pp=pp)
    try:
        return fn(ctx, *args)
    finally:
        tpcore.shutdown()


def equal(ctx: tpcore.ParallelContext, count: int) -> None:
    dense = plain(4, tied=True)
    want = dense(**batch_of(8))
    want.backward()
    for engine in ("layers", "lockstep"):
        model = cut(4, ctx, tied=True)
        pipe = tpcore.PipelineModel(model, count)
        tpcore.move_model_to_device(model, ctx.device)
        batch = {k: v.to(ctx.device) for k, v in batch_of(8).items()}
        if engine == "layers":
            loss = model(**batch)
            loss.backward()
        else:
            loss = pipe.run_train(**batch)
        ctx.backend.mark_step()
        torch.testing.assert_close(loss.detach().cpu(), want.detach(), rtol=1e-8, atol=1e-8)
        grads = {n: p.grad.cpu() for n, p in model.named_parameters()}
        tpcore.move_model_to_device(model, "cpu")
        for name, p in model.named_parameters():
            p.grad = grads[name]
        assert_same_gradients(model, dense, ctx, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("pp", "tp", "count"), [(2, 1, 4), (2, 2, 2), (4, 1, 4)])
def test_a_pipeline_is_the_plain_model(pp: int, tp: int, count: int) -> None:
    on_stages(pp, tp, equal, count)


def counted(ctx: tpcore.ParallelContext, engine: str) -> list[tuple[int, list[int]]]:
    """By number of microbatches: programs compiled for it, and by step."""
    found = []
    for count in (4, 8, 16):
        model = cut(2, ctx)
        pipe = tpcore.PipelineModel(model, count)
        tpcore.move_model_to_device(model, ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        by_step = []
        for step in range(4):
            batch = {k: v.to(ctx.device) for k, v in batch_of(2 * count, step).items()}
            before = len(programs())
            if engine == "layers":
                model(**batch).backward()
            else:
                pipe.run_train(**batch)
            tpcore.optimizer_step(optimizer, max_norm=1.0)
            optimizer.zero_grad(set_to_none=False)
            made = programs()[before:]
            by_step.append(
                (
                    len(made),
                    sum(p.compiled for p in made),
                    max(p.operations for p in made),
                    len({p.digest for p in made}),
                )
            )
        found.append(by_step)
    return found


@pytest.mark.parametrize("engine", ["layers", "lockstep"])
def test_programs(engine: str) -> None:
    got = on_stages(2, 1, counted, engine)
    print(got[0])
    assert 0
