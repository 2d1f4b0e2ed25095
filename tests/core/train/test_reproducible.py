"""With ``reproducible`` a training run has the same bits at every degree of tp, dp and pp, and goes on at another."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.tiers import tiers
from torch import Tensor, nn

import tpcore
from tpcore import checkpoint
from tpcore.layers.loss import parallel_cross_entropy
from tpcore.layers.sharding import sharding
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

MOST, BATCH = 8, 4
State = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32, dtype=dtype)
        self.up = tpcore.ColumnParallelLinear(32, 64, gather_output=False, dtype=dtype)
        self.down = tpcore.RowParallelLinear(64, 32, input_is_parallel=True, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    """With a tied table, and at pp=2 with stages of two layers and of one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.pp = tpcore.current().mesh.axes.get("pp", 1)
        self.all = tpcore.current().comm("pp", "tp") if self.pp > 1 else None
        self.table = tpcore.ParallelEmbedding(64, 32, dtype=dtype, group=self.all)
        self.layers = nn.ModuleList(Block(dtype) for _ in range(3 if self.pp < 3 else self.pp))
        self.head = tpcore.ColumnParallelLinear(32, 64, bias=False, gather_output=False, dtype=dtype, group=self.all)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return parallel_cross_entropy(self.head(x)[:, :-1], ids[:, 1:], group=self.all).mean()


def made(zero: bool, dtype: torch.dtype) -> tuple[Net, Any]:
    torch.manual_seed(0)
    net = Net(dtype)
    if net.pp > 1:
        net.layers = tpcore.PipelinedLayers(net.layers, BATCH, layers_per_stage="balanced")
    if not zero:
        return net, torch.optim.AdamW(net.named_parameters(), lr=1e-2)
    master = torch.float32 if dtype is torch.bfloat16 else None
    return net, tpcore.Zero1(torch.optim.AdamW, net.named_parameters(), lr=1e-2, master_dtype=master)


def train(ctx: ParallelContext, net: Net, optimizer: Any, steps: range, microbatches: int = BATCH) -> list[float]:
    """The norms of the steps, each of as many microbatches on all dp ranks together."""
    mine, norms = microbatches // ctx.mesh.axes.get("dp", 1), []
    for step in steps:
        batch = torch.randint(64, (microbatches, 2, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        batch = batch[ctx.mesh.coords(ctx.rank).get("dp", 0) * mine :][:mine]
        if net.pp > 1:
            tpcore.PipelineModel(net, mine).run_train(batch.flatten(0, 1))
        for ids in batch if net.pp == 1 else ():
            (net(ids) / mine).backward()
        norms.append(tpcore.optimizer_step(optimizer, max_norm=0.5).item())
    return norms


def whole(net: nn.Module, of: Callable[[Tensor], Any] = Tensor.detach) -> State:
    marks = {name: (of(p), sharding(p)) for name, p in net.named_parameters()}
    return {name: p if mark is None else mark.whole(p) for name, (p, mark) in marks.items()}


def run(mesh: Mesh, zero: bool, dtype: torch.dtype, most: int | None = MOST) -> tuple[list[float], State]:
    def rank(ctx: ParallelContext) -> tuple[list[float], State]:
        net, optimizer = made(zero, dtype)
        return train(ctx, net, optimizer, range(2)), whole(net)

    every = run_ranks(mesh, rank, reproducible=most)
    union = {name: t for _, state in every for name, t in state.items()}  # of all stages
    for norms, state in every:
        assert norms == every[0][0]
        assert different(state, union) == []
    return every[0][0], union


def different(state: State, other: State) -> list[str]:
    return [name for name, t in state.items() if not torch.equal(t, other[name])]


MESHES = [{"tp": 4}, {"pp": 2, "tp": 2}, {"dp": 4, "tp": 1}]
MORE = [
    {"tp": 2},
    {"tp": 8},
    {"dp": 2, "tp": 2},
    {"pp": 2, "tp": 4},
    {"pp": 2, "dp": 2, "tp": 1},
    {"dp": 2, "tp": 1},
    {"dp": 2, "tp": 4},
    {"dp": 4, "tp": 2},
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("axes", tiers(MESHES, MORE), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [False, True], ids=["torch", "zero1"])
def test_steps_have_the_same_bits_on_every_mesh(zero: bool, dtype: str, axes: dict[str, int]) -> None:
    norms, state = run(Mesh({"tp": 1}), zero, DTYPES[dtype])
    other_norms, other = run(Mesh(axes), zero, DTYPES[dtype])
    assert norms == other_norms
    assert different(state, other) == []


def test_without_it_they_have_not() -> None:
    """Else this test would show nothing."""
    states = [run(Mesh({"tp": tp}), False, torch.float32, None)[1] for tp in (1, 2)]
    assert different(*states)


@pytest.mark.parametrize("zero", [False, True], ids=["torch", "zero1"])
def test_a_run_goes_on_at_another_degree_as_if_it_had_never_stopped(tmp_path: Path, zero: bool) -> None:
    def stop(ctx: ParallelContext) -> None:
        net, optimizer = made(zero, torch.float32)
        train(ctx, net, optimizer, range(2))
        checkpoint.save({"model": net.state_dict(), "optimizer": optimizer}, tmp_path / "saved")

    def go_on(ctx: ParallelContext) -> State:
        net, optimizer = made(zero, torch.float32)
        checkpoint.load(tmp_path / "saved", net, optimizer=optimizer)
        train(ctx, net, optimizer, range(2, 4))
        return whole(net)

    def never(ctx: ParallelContext) -> State:
        net, optimizer = made(zero, torch.float32)
        train(ctx, net, optimizer, range(4))
        return whole(net)

    run_ranks(Mesh({"pp": 2, "dp": 2, "tp": 1} if zero else {"dp": 2, "tp": 2}), stop, reproducible=MOST)
    want = run_ranks(Mesh({"tp": 1}), never, reproducible=MOST)[0]
    for axes in ({"tp": 4}, {"dp": 4, "tp": 1}, {"pp": 2, "tp": 2}):
        for state in run_ranks(Mesh(axes), go_on, reproducible=MOST):
            assert different(state, want) == []


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_in_stages_have_the_same_bits_in_the_models_own_forward(recompute: bool) -> None:
    """Twice, so that the second backward finds gradients of the first."""

    def rank(ctx: ParallelContext) -> State:
        torch.manual_seed(0)
        net = Net(torch.float32)
        net.layers = tpcore.PipelinedLayers(
            net.layers, 2, recompute=recompute, layers_per_stage="balanced" if net.pp > 1 else None
        )
        for step in range(2):
            net(torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(step))).backward()
        return whole(net, attrgetter("grad"))

    want = run_ranks(Mesh({"pp": 1, "tp": 1}), rank, reproducible=MOST)[0]
    for state in run_ranks(Mesh({"pp": 2, "tp": 2}), rank, reproducible=MOST):
        assert different(state, want) == []


def test_an_engine_on_a_lazy_backend_is_refused() -> None:
    def rank(ctx: ParallelContext) -> bool:
        net = Net(torch.float32)
        net.layers = tpcore.PipelinedLayers(net.layers, 2, layers_per_stage="balanced")
        net.layers.pp.eager = False
        with pytest.raises(ValueError, match=r"reproducible=8 on a lazy backend.*use PipelinedLayers"):
            tpcore.PipelineModel(net, 2)
        return True

    assert run_ranks(Mesh({"pp": 2, "tp": 1}), rank, reproducible=MOST) == [True, True]


def test_gradients_that_a_script_changes_between_backwards_stay_changed() -> None:
    def rank(ctx: ParallelContext) -> bool:
        p = nn.Module()
        p.weight = nn.Parameter(torch.zeros(2))
        for value in (1.0, 2.0, 4.0):
            (p.weight * value).sum().backward()
        assert p.weight.grad.tolist() == [7.0, 7.0]
        p.weight.grad.zero_()
        (p.weight * 8.0).sum().backward()
        (p.weight * 16.0).sum().backward()
        assert torch.autograd.grad((p.weight * 64.0).sum(), p.weight)[0].tolist() == [64.0, 64.0]
        assert p.weight.grad.tolist() == [24.0, 24.0]
        p.weight.grad = torch.ones(2)
        (p.weight * 32.0).sum().backward()
        return p.weight.grad.tolist() == [33.0, 33.0]

    assert run_ranks(Mesh({"tp": 1}), rank, reproducible=2) == [True]


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


def test_a_backward_that_raises_leaves_no_gradient_behind() -> None:
    def rank(ctx: ParallelContext) -> Any:
        p = nn.Module()
        p.weight, x = nn.Parameter(torch.zeros(2)), torch.ones(2, requires_grad=True)
        (p.weight * 3.0).sum().backward()
        with pytest.raises(RuntimeError, match="out of memory"):
            torch.autograd.grad((p.weight * _Raises.apply(x)).sum(), (p.weight, x))
        kept = p.weight.grad.tolist()
        p.zero_grad()
        (p.weight * 5.0).sum().backward()
        return kept, p.weight.grad.tolist()

    assert run_ranks(Mesh({"tp": 1}), rank, reproducible=2) == [([3.0, 3.0], [5.0, 5.0])]


@pytest.mark.parametrize(
    ("axes", "most", "message"),
    [
        ({"tp": 2}, 3, "power of two from 2 on, not 3"),
        ({"tp": 2}, True, "power of two from 2 on, not True"),
        ({"tp": 4}, 2, "reproducible=2 with tp=4.*up to 2; pass a larger number"),
        ({"tp": 3}, 8, "reproducible=8 with tp=3"),
        ({"dp": 3, "tp": 1}, 8, "reproducible=8 with dp=3"),
        ({"ep": 2, "tp": 1}, 8, "with ep=2: an expert's product"),
        ({"cp": 2, "tp": 1}, 8, "with cp=2: attention adds"),
    ],
)
def test_a_job_that_cannot_be_reproducible_is_refused(axes: dict[str, int], most: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(Mesh(axes), lambda ctx: None, reproducible=most)


def test_several_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(ValueError, match=r"with 2 threads.*set_num_threads\(1\)"):
        tpcore.init("cpu_gloo", reproducible=8)
    assert not tpcore.runtime.context.is_initialized()


BEFORE = nn.Linear(4, 4)


def test_gradients_in_another_order_are_refused_on_every_rank() -> None:
    def rank(ctx: ParallelContext) -> bool:
        net, optimizer = made(False, torch.float32)
        with pytest.raises(ValueError, match="could not share a sum of 3 gradients"):
            train(ctx, net, optimizer, range(1), 3)
        BEFORE.weight.grad = torch.ones(4, 4)
        with pytest.raises(ValueError, match=r"parameter 0, of shape \(4, 4\).*made before tpcore\.init"):
            tpcore.optimizer_step(torch.optim.AdamW(BEFORE.parameters()))
        with pytest.raises(ValueError, match=r"grad_dtype=torch\.float32 adds"):
            tpcore.Zero1(torch.optim.AdamW, net.parameters(), grad_dtype=torch.float32)
        with pytest.raises(ValueError, match="draws other numbers at another degree"), tpcore.random.sharded():
            pass
        return True

    assert run_ranks(Mesh({"tp": 2}), rank, reproducible=8) == [True, True]
