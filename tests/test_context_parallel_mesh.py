"""Every gradient of models whose tokens are dealt to ranks, where cp meets the other axes of a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelines import part_of
from test_context_parallel_models import (
    BATCHES,
    CP2_PP2,
    CP2_TP2,
    CP4,
    DP2_CP2,
    EXACT,
    MODELS,
    WAYS,
    _exact,  # noqa: F401  float64 throughout
    assert_equal,
    made,
    rows_of,
    stepped,
)

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks

pytestmark = pytest.mark.slow
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "cp4": (CP4, {}),
    "cp2 tp2 sequence parallel": (CP2_TP2, {"sequence_parallel": True}),
    "cp2 pp2 tp2 sequence parallel": (CP2_PP2 | {"tp": 2}, {"num_microbatches": 2, "sequence_parallel": True}),
}
# gemma 2 has layers of two kinds, of which no stages are made
CELLS = [(n, b, m) for n in MODELS for b in BATCHES for m in MESHES if not (n.startswith("gemma") and "pp" in m)]


@pytest.mark.parametrize(("name", "batch", "mesh"), CELLS)
def test_equals_the_whole_model(name: str, batch: str, mesh: str) -> None:
    axes, options = MESHES[mesh]
    given = BATCHES[batch]()
    if name == "bert":  # has no cache
        given.pop("use_cache", None)
    if name.startswith("gemma") and batch == "padded":
        # of a token that sees none, eager attention makes the mean of all values: it has no say in the loss here
        given["labels"][:, 1:].masked_fill_(given["attention_mask"][:, :-1] == 0, -100)
    assert_equal(MODELS[name], axes, given, WAYS[CELLS.index((name, batch, mesh)) % 3], **options)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_what_zero1_steps_with(name: str, batch: str) -> None:
    """A step of plain descent at a rate of 1 takes the whole gradient off each parameter."""
    given = stepped(name, batch, 0)
    whole = made(MODELS[name])
    torch.stack([whole(**row).loss for row in rows_of(given, 2)]).mean().backward()
    want = {key: (p - p.grad).detach() for key, p in whole.named_parameters()}
    way = WAYS[(len(name) + len(batch)) % 3]

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(made(MODELS[name]), context_parallel=way)
        optimizer = tpcore.Zero1(torch.optim.SGD, model.named_parameters(), lr=1.0)
        model(**rows_of(given, 2)[ctx.index(ctx.batch)]).loss.backward()
        tpcore.optimizer_step(optimizer)
        for key, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), part_of(want[key], p, ctx), rtol=EXACT, atol=EXACT)

    run_ranks(Mesh(DP2_CP2), rank)
