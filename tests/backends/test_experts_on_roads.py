"""Tokens that go to the experts of other processes, through shared memory and over gloo."""

from __future__ import annotations

from typing import Any

import hf
import pytest
import torch
from pipelines import part_of
from roads import GLOO, SHARED, OverRoad, each_road  # noqa: F401  a fixture
from test_experts import ROUNDS, batches, mixtral

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.models.experts import ShardedExperts
from tpcore.runtime.context import ParallelContext


def _step(ctx: ParallelContext, options: dict[str, Any]) -> str:
    """The loss and all gradients are those of one process. Returns what carries tokens over ep."""
    (examples,) = batches(2)[:1]
    whole: Any = hf.double(mixtral)
    losses = [whole(**one).loss for one in examples]
    (sum(losses) / 2).backward()
    model: Any = tpcore.parallelize(hf.double(mixtral), **options)
    loss = model(**examples[ctx.index(ctx.batch)]).loss
    loss.backward()
    tpcore.reduce_gradients(model)
    torch.testing.assert_close(loss, losses[ctx.index(ctx.batch)], rtol=ROUNDS, atol=ROUNDS)
    full = dict(whole.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, part_of(full[name].grad, p, ctx), rtol=ROUNDS, atol=ROUNDS)
    route = next(m.route for m in model.modules() if isinstance(m, ShardedExperts))
    assert str(route).startswith(options.get("dispatch", "gathered"))
    return repr(ctx.comm("ep").transport)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "pool"), [({}, SHARED), ({"dispatch": "all_to_all"}, GLOO)], indirect=["pool"], ids=str
)
def test_experts_of_other_processes(options: dict[str, Any], pool: OverRoad) -> None:
    for road in pool.run(Mesh({"dp": 1, "ep": 2, "tp": 1}), _step, options):
        assert road.startswith("shared memory" if pool.shared else "gloo")
