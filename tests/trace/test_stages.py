"""What a pipeline has trained is served without stages, at any tp."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import traced_in
from pipelines import CutModel, batch_of, cut, ends_of
from torch import Tensor, nn

import tpcore
from tpcore import Mesh, ParallelContext, Zero1
from tpcore.comm import mappings as ops
from tpcore.testing import run_ranks

IDS = batch_of(4, 9)["ids"]


class Logits(nn.Module):
    """A trained model up to its logits: what is served takes no labels."""

    def __init__(self, model: CutModel) -> None:
        super().__init__()
        self.model, self.ends = model, ends_of(tpcore.current())

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.model.embed(ids), ids.shape[1]
        mix = torch.ones(n, n, dtype=x.dtype).tril() / n
        for layer in self.model.layers:
            x = layer(x, mix)
        return ops.gather(self.model.head(self.model.norm(x)), self.ends, 2)


def _trained(ctx: ParallelContext, folder: Path) -> Tensor:
    """Its logits, after steps as two stages."""
    model = cut(4, ctx)
    pipe = tpcore.PipelineModel(model, 2)
    pipe.layers.shared = ["mix"]
    optimizer = Zero1(torch.optim.AdamW, model.named_parameters(), lr=0.05)
    for step in range(2):
        pipe.run_train(**batch_of(4, step))
        tpcore.optimizer_step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    tpcore.checkpoint.save({"model": model.state_dict(), "optimizer": optimizer}, folder)
    with torch.no_grad():
        return Logits(model)(IDS)


def _loaded(folder: Path, piped: bool) -> nn.Module:
    """The class that was trained. ``piped``: its pipeline too, as it was written for training."""
    model = cut(4, tpcore.current())
    if piped:
        model.layers = tpcore.PipelinedLayers(model.layers, 2, shared=["mix"])
    tpcore.checkpoint.load(folder, model)
    return Logits(model)


@pytest.mark.parametrize("piped", [False, True])
def test_a_checkpoint_of_stages_is_traced_and_served_at_any_tp(pool: Any, tmp_path: Path, piped: bool) -> None:
    """The vocabulary is cut over pp x tp, as in training, and batches are of any size."""
    want, *_ = run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 2}), lambda ctx: _trained(ctx, tmp_path / "c"))
    sizes = ({0: torch.export.Dim("rows", min=1, max=8)},)
    for tp in (1, 2, 4):
        folder, load = tmp_path / f"tp{tp}", partial(_loaded, tmp_path / "c", piped)
        with traced_in(pool, folder, load, (IDS,), tp, dynamic_shapes=sizes) as served:
            for rows in (4, 1, 3):
                # 1e-12: float64 through a few layers
                torch.testing.assert_close(served(IDS[:rows]), want[:rows], rtol=1e-12, atol=1e-12)
