"""Marks that a script sets itself on parameters that it has sharded: read wherever a parameter enters, or refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpcore
import tpcore_nxd as nxd
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore_nxd.optimizer import NeuronZero1Optimizer
from tpcore_nxd.parallel_layers import grads, layers, utils

Marks = dict[str, Any]
TP, EP, BOTH = Mesh({"dp": 1, "tp": 2}), Mesh({"ep": 2, "tp": 1}), Mesh({"dp": 1, "ep": 2, "tp": 2})


class Own(nn.Module):
    """Two parameters of a script's own: ``same`` on every rank, and ``part``, marked."""

    def __init__(self, part: Tensor, marks: Marks) -> None:
        super().__init__()
        self.part, self.same = nn.Parameter(part), nn.Parameter(torch.ones(2))
        for name, value in marks.items():
            setattr(self.part, name, value)

    def forward(self, x: float) -> Tensor:
        return x * (self.part.sum() + self.same.sum())


# -- the step ---------------------------------------------------------------------------------------------
def _by_torch(model: nn.Module) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return lambda: tpcore.optimizer_step(optimizer)


def _by_hand(model: nn.Module) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return lambda: (tpcore.reduce_gradients(model), optimizer.step())


def _overlapped(model: nn.Module) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        with tpcore.overlap_grad_reduce(optimizer):
            model(0.0).backward()
        tpcore.optimizer_step(optimizer)

    return step


def _by_zero1(model: nn.Module) -> Callable[[], Any]:
    return NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, lr=1.0, grad_clipping=False).step


def _by_trainer(model: nn.Module, zero1: bool) -> Callable[[], Any]:
    options = {"zero_one_enabled": zero1, "grad_clipping": False}
    config = nxd.neuronx_distributed_config(expert_parallel_size=2, optimizer_config=options)
    step: Callable[[], Any] = nxd.initialize_parallel_optimizer(
        config, torch.optim.SGD, model.named_parameters(), lr=1.0
    ).step
    return step


STEPS = [
    _by_torch,
    _by_hand,
    _overlapped,
    _by_zero1,
    partial(_by_trainer, zero1=False),
    partial(_by_trainer, zero1=True),
]


def _experts(ctx: ParallelContext, step: Callable[[nn.Module], Callable[[], Any]]) -> tuple[float, float]:
    model = Own(torch.tensor([20.0 if ctx.rank else 10.0]), {"expert_model_parallel": True})
    take = step(model)
    model(6.0 if ctx.rank else 2.0).backward()
    take()
    first = model.part.item(), model.same[0].item()
    model.zero_grad()
    for x in (2.0, 4.0):  # the same in two parts
        model(x if ctx.rank else x / 3).backward()
    take()
    assert (model.part.item() - first[0], model.same[0].item() - first[1]) == pytest.approx(
        (-3 if ctx.rank else -1, -4)
    )
    return first


@pytest.mark.parametrize("step", STEPS)
def test_experts_keep_their_own_gradient(step: Callable[[nn.Module], Callable[[], Any]]) -> None:
    # gradients 2 and 6, each of one of two batches; of what all ranks have their mean is 4
    assert run_ranks(EP, partial(_experts, step=step)) == [(9.0, -3.0), (17.0, -3.0)]


# -- the norm ---------------------------------------------------------------------------------------------
def _clip(model: Own) -> Tensor:
    return grads.clip_grad_norm(model.parameters(), 1.0)


def _step_clips(model: Own) -> Tensor:
    return tpcore.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.0), max_norm=1.0)


def _zero1_clips(model: Own) -> Tensor:
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.0)
    optimizer.step()
    return optimizer.grad_norm


# with the mean over the batches, two with experts, or without
MEANS = [_step_clips, _zero1_clips]
NORMS = [*MEANS, _clip, grads.get_grad_norm, partial(tpcore.clip_grad_norm, max_norm=1.0)]


def _norm(ctx: ParallelContext, marks: Marks, norm: Callable[..., Tensor]) -> float:
    model = Own(torch.zeros(2, 2), marks)
    model.part.grad = torch.full((2, 2), 1.0 + ctx.rank)
    model.same.grad = torch.tensor([2.0, 3.0])
    return float(norm(model))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("mesh", "marks", "square"),  # of the whole gradient, 13 of which are those of `same`
    [
        (TP, {"tensor_model_parallel": True}, 13 + 4 * (1 + 4)),
        (TP, {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 2}, 13 + 4 * (1 + 4)),
        (BOTH, {"tensor_model_parallel": True, "expert_model_parallel": True}, 13 + 4 * (1 + 4 + 9 + 16)),
    ],
)
def test_norms_are_of_the_whole_gradient(mesh: Mesh, marks: Marks, square: int, norm: Callable[..., Tensor]) -> None:
    if norm in MEANS and "ep" in mesh.axes:
        square = 13 + (square - 13) // 4
    got = run_ranks(mesh, partial(_norm, marks=marks, norm=norm))
    assert got == pytest.approx([square**0.5] * mesh.size)


# -- layers, copies and checkpoints -----------------------------------------------------------------------
def _expert_of_layers(ctx: ParallelContext, folder: Path) -> None:
    model = nn.ModuleList([layers.ColumnParallelLinear(2, 4, gather_output=False), layers.RowParallelLinear(4, 2)])
    for p in model.parameters():
        p.expert_model_parallel = True
        with torch.no_grad():
            p.fill_(ctx.rank)
    model.double()  # which stamps a layer's parameters anew
    tpcore.reduce_gradients(model)
    tpcore.checkpoint.save({"model": model.state_dict()}, folder)
    values = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict({name: torch.zeros_like(t) for name, t in model.state_dict().items()})
    tpcore.checkpoint.load(folder, model)
    # a bias of the row layer, the same on all tp ranks, is written once
    for p, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(p, torch.full_like(p, 2 * ctx.coord("ep")) if p is model[1].bias else value)


def test_experts_of_layers_go_through_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(BOTH, partial(_expert_of_layers, folder=tmp_path / "out"))


def _saves(ctx: ParallelContext, folder: Path, marks: Marks) -> None:
    config = nxd.neuronx_distributed_config(tensor_parallel_size=ctx.mesh.axes["tp"])
    model = nxd.initialize_parallel_model(config, partial(Own, torch.arange(2.0) + 2 * ctx.rank, marks))
    nxd.save_checkpoint(folder, "1", model)


def _loads(ctx: ParallelContext, folder: Path) -> list[float]:
    model = Own(torch.zeros(4), {"tensor_model_parallel": True})
    nxd.load_checkpoint(folder, "1", model)
    values: list[float] = model.part.tolist()
    return values


@pytest.mark.parametrize(("stride", "whole"), [(1, [0.0, 1.0, 2.0, 3.0]), (2, [0.0, 2.0, 1.0, 3.0])])
def test_a_save_before_the_first_step_has_all_parts(stride: int, whole: list[float], tmp_path: Path) -> None:
    marks = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": stride}
    run_ranks(TP, partial(_saves, folder=tmp_path, marks=marks))
    assert run_ranks(Mesh({"tp": 1}), partial(_loads, folder=tmp_path)) == [whole]


def _copies(ctx: ParallelContext) -> None:
    source, copy, plain = (nn.Parameter(torch.zeros(2, 2)) for _ in range(3))
    source.tensor_model_parallel = source.expert_model_parallel = True
    source.partition_dim = 1
    utils.copy_tensor_model_parallel_attributes(copy, source)
    assert (copy.tensor_model_parallel, copy.expert_model_parallel, copy.partition_dim) == (True, True, 1)
    first = ctx.coord("tp") == 0
    answers = [layers.param_is_not_tensor_parallel_duplicate(p) for p in (source, copy, plain)]
    assert answers == [True, True, first]
    plain.expert_model_parallel = True
    assert layers.param_is_not_tensor_parallel_duplicate(plain) is first


def test_marks_are_copied_and_asked_for() -> None:
    run_ranks(BOTH, _copies)


# -- refused ----------------------------------------------------------------------------------------------
def _row_bias() -> nn.Module:
    layer = layers.RowParallelLinear(4, 2)
    layer.bias.tensor_model_parallel = True
    return layer


def _uncut_weight() -> nn.Module:
    layer = layers.RowParallelLinear(4, 2)
    layer.weight.tensor_model_parallel = False
    return layer


def _fused_expert() -> nn.Module:
    layer = layers.ColumnParallelLinear(4, 8, bias=False, stride=2)
    layer.weight.expert_model_parallel = True
    return layer


REFUSED = [
    (_row_bias, r"parameter \S+: tensor_model_parallel=True .* leave its marks as the layer sets them"),
    (_uncut_weight, r"parameter \S+: tensor_model_parallel=False .*, and its layer has it as 2x4"),
    (_fused_expert, r"parameter \S+: .* one of 2 parts over ep: blocks of dim 0 .* a dim of their own"),
    (lambda: Own(torch.zeros(()), {"tensor_model_parallel": True}), r"parameter \S+: .* 2 parts along dim 0: it has"),
    (lambda: Own(torch.zeros(()), {"expert_model_parallel": True}), r"parameter \S+: .* 2 parts along dim 0: it has"),
    (lambda: Own(torch.zeros(2), {"tensor_model_parallel": 1, "partition_dim": 1}), "2 parts along dim 1: it has none"),
]


def _refuses(ctx: ParallelContext, make: Callable[[], nn.Module], match: str) -> None:
    model = make()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for enter in (
        lambda: grads.clip_grad_norm(model, 1.0),
        lambda: tpcore.reduce_gradients(model),
        lambda: tpcore.optimizer_step(torch.optim.SGD(model.named_parameters(), lr=1.0)),
        lambda: NeuronZero1Optimizer(model.named_parameters(), torch.optim.SGD, lr=1.0),
    ):
        with pytest.raises(ValueError, match=match):
            enter()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_marks_that_contradict_a_layout(make: Callable[[], nn.Module], match: str) -> None:
    run_ranks(BOTH, partial(_refuses, make=make, match=match))


@pytest.mark.parametrize("make", [make for make, _ in REFUSED])
def test_marks_on_one_rank_mean_nothing(make: Callable[[], nn.Module]) -> None:
    def steps(_: ParallelContext) -> None:
        tpcore.optimizer_step(torch.optim.SGD(make().parameters(), lr=1.0))

    run_ranks(Mesh({"dp": 2, "tp": 1}), steps)


def test_marks_are_read_where_a_script_imports_what_is_nxd_s_and_nowhere_else() -> None:
    code = """
import sys, tpcore
tpcore.parallelize, tpcore.explain  # names that extensions add
print("tpcore_nxd.marks" in sys.modules)
for name in sys.argv[1:]:
    for known in [m for m in sys.modules if m.startswith("tpcore_nxd")]:
        del sys.modules[known]
    __import__(f"tpcore_nxd.{name}")
    print("tpcore_nxd.marks" in sys.modules)
"""
    paths = ["parallel_layers", "parallel_state", "trainer", "optimizer", "pipeline", "modules", "utils", "operators"]
    found = subprocess.run([sys.executable, "-c", code, *paths], check=True, capture_output=True, text=True).stdout
    assert found.split() == ["False", *["True"] * len(paths)]
