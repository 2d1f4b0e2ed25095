"""A model built on one mesh and used under another: refused on every rank, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import files_in
from helpers.worlds import each_rank
from torch import nn

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

Model = nn.Sequential


def built() -> Model:
    return nn.Sequential(
        tpcore.ColumnParallelLinear(4, 8, gather_output=False), tpcore.RowParallelLinear(8, 4, input_is_parallel=True)
    )


def stepped(model: Model) -> None:
    tpcore.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1), max_norm=1.0)


USES: dict[str, Callable[[Model], object]] = {
    "optimizer_step": stepped,
    "reduce_gradients": tpcore.reduce_gradients,
    "clip_grad_norm": lambda model: tpcore.clip_grad_norm(model, 1.0),
    "Zero1": lambda model: tpcore.Zero1(torch.optim.SGD, model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("other", [{"dp": 2, "tp": 1}, {"pp": 2, "dp": 1, "tp": 1}])
@each_rank(tp=2)
def test_a_model_of_another_mesh_is_refused(ctx: ParallelContext, use: str, other: dict[str, int]) -> None:
    model = built()
    model(torch.ones(2, 4)).sum().backward()
    inner = ParallelContext(ctx.backend, Mesh(other), ctx.rank)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with tpcore.use(inner), pytest.raises(ValueError, match=r"under another context, on mesh \{'tp': 2\}"):
        USES[use](model)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, after))


@each_rank(tp=2)
def test_axes_of_one_rank_make_no_other_mesh(ctx: ParallelContext) -> None:
    model = built()
    model(torch.ones(2, 4)).sum().backward()
    with tpcore.use(ParallelContext(ctx.backend, Mesh({"pp": 1, "dp": 1, "tp": 2}), ctx.rank)):
        stepped(model)


@pytest.mark.parametrize("what", ["model", "optimizer"])
@pytest.mark.parametrize(("mesh", "other"), [({"tp": 2}, {"dp": 2, "tp": 1}), ({"dp": 2, "tp": 1}, {"dp": 1, "tp": 2})])
def test_a_model_of_another_mesh_does_not_replace_a_checkpoint(
    what: str, mesh: dict[str, int], other: dict[str, int], tmp_path: Path
) -> None:
    path = tmp_path / "ck"

    def check(ctx: ParallelContext) -> None:
        model = built()
        optimizer = torch.optim.AdamW(model.named_parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state = model.state_dict() if what == "model" else {"optimizer": optimizer}
        tpcore.checkpoint.save(state, path)
        before = files_in(path)
        with (
            tpcore.use(ParallelContext(ctx.backend, Mesh(other), ctx.rank)),
            pytest.raises(ValueError, match=r"was built on mesh .* and not on"),
        ):
            tpcore.checkpoint.save(state, path)
        assert before == files_in(path)

    run_ranks(Mesh(mesh), check)
