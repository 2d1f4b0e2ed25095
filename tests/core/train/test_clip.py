"""Clipping by the norm of the full gradient, as torch does it on the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from helpers.nets import Heads, assert_same_parameters, cut_net, ids_of, loss_of, plain_net
from helpers.worlds import each_rank
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import tpcore
from tpcore.comm.transport import Primitive, Transport
from tpcore.comm.wrapper import TransportWrapper
from tpcore.layers.sharding import sharding
from tpcore.layout.layout import Slot
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.runtime.guards import whole_tensors_only
from tpcore.testing import run_ranks

INF = float("inf")

GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda net: (p for p in net.parameters()),
    "parameters()": lambda net: net.parameters(),
    "list": lambda net: list(net.parameters()),
    "list with repetitions": lambda net: [*net.parameters(), *net.parameters()],
    "module": lambda net: net,
}


@pytest.mark.parametrize(
    ("tp", "p", "given"),
    [(2, 2, given) for given in GIVEN] + [(4, p, "module") for p in (1, 2, 2.5, INF, "inf")] + [(1, 3, "list")],
)
def test_clips_as_torch_does_on_the_unsharded_model(tp: int, p: float | str, given: str) -> None:
    plain = plain_net()
    loss_of(plain, ids_of()).backward()
    full = plain.state_dict()
    want = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, float(p))
    clipped = {k: q.grad for k, q in plain.named_parameters() if q.grad is not None}

    def rank(ctx: ParallelContext) -> Tensor:
        net = cut_net(full)
        loss_of(net, ids_of()).backward()
        norm = tpcore.clip_grad_norm(GIVEN[given](net), 0.1, p)
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
        assert norm.shape == ()
        assert net.unused.weight.grad is None
        del net.unused
        assert_same_parameters(net, clipped, ctx, lambda q: q.grad)
        return norm

    first, *others = run_ranks(Mesh({"dp": 1, "tp": tp}), rank)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("p", [1.0, 2.0, INF])
@each_rank(tp=2)
def test_one_parameter_cut_or_not(ctx: ParallelContext, p: float) -> None:
    layer = tpcore.RowParallelLinear(8, 4)
    layer.weight.grad = torch.full_like(layer.weight, 2.0)
    layer.bias.grad = torch.full_like(layer.bias, 3.0)
    assert tpcore.clip_grad_norm(layer.weight, 1e9, p) == torch.full((32,), 2.0).norm(p)
    assert tpcore.clip_grad_norm(layer.bias, 1e9, p) == torch.full((4,), 3.0).norm(p)


@each_rank(tp=2)
def test_small_gradients_are_left_alone(ctx: ParallelContext) -> None:
    layer = tpcore.ColumnParallelLinear(4, 4)
    grad = torch.randn_like(layer.weight)
    layer.weight.grad = grad.clone()
    tpcore.clip_grad_norm(layer, 1e6)
    assert torch.equal(layer.weight.grad, grad)
    tpcore.clip_grad_norm(layer, 0)
    assert not layer.weight.grad.any()
    assert tpcore.clip_grad_norm([], 1.0) == tpcore.clip_grad_norm(tpcore.ColumnParallelLinear(4, 4), 1.0) == 0


@each_rank(tp=2)
def test_a_gradient_on_one_rank_only(ctx: ParallelContext) -> None:
    layer = tpcore.ColumnParallelLinear(4, 4, bias=False)
    if ctx.rank == 1:
        layer.weight.grad = torch.ones_like(layer.weight)
    assert tpcore.clip_grad_norm(layer, 1e9, 1) == 8


@pytest.mark.parametrize("grad_dtype", [None, torch.float64])
@each_rank(dp=2, tp=1)
def test_gradients_of_a_zero1_are_averaged_before(ctx: ParallelContext, grad_dtype: torch.dtype | None) -> None:
    """Its step would do that later, and each dp rank have clipped by a norm of its own."""
    first, second = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = tpcore.Zero1(torch.optim.SGD, [("w", first), ("v", second)], lr=1.0, grad_dtype=grad_dtype)
    (first * (1 + 2 * ctx.rank)).sum().backward()
    with pytest.raises(ValueError, match=r"of 1 parameter, and a Zero1 has the gradients of 2.*max_norm=\)"):
        tpcore.clip_grad_norm(first, 2.0)
    assert tpcore.clip_grad_norm([first, second], 2.0) == 4
    optimizer.step()
    torch.testing.assert_close(first, torch.zeros(4), rtol=0, atol=1e-6)  # 1e-6 beside the norm in the quotient
    assert (second == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_rank(tp=2)
def test_norm_of_half_precision_gradients_is_taken_in_float32(ctx: ParallelContext, dtype: torch.dtype) -> None:
    """1024 squares of 100 overflow float16, and bfloat16 stops counting at 256."""
    layer = tpcore.ColumnParallelLinear(32, 64, bias=False, dtype=dtype)
    layer.weight.grad = torch.full_like(layer.weight, 100.0)
    norm = tpcore.clip_grad_norm(layer, 50.0)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(100 * 2048**0.5, rel=1e-6)
    assert layer.weight.grad.dtype == dtype


def _converted(net: nn.Module) -> nn.Module:
    return net.to(torch.float64)


def _emptied(net: nn.Module) -> nn.Module:
    state = {k: v.clone() for k, v in net.state_dict().items()}
    net = net.to("meta").to_empty(device="cpu")
    net.load_state_dict(state)
    return net


def _replaced(net: nn.Module) -> nn.Module:
    for module in net.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    return net


def _with(future: Callable[[bool], None], change: Callable[[nn.Module], nn.Module]) -> Callable[..., nn.Module]:
    """``change`` as torch makes it with one of its settings for conversions turned on."""

    def changed(net: nn.Module) -> nn.Module:
        future(True)
        try:
            return change(net)
        finally:
            future(False)

    return changed


def _loaded(net: nn.Module, *, assign: bool = False) -> nn.Module:
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=assign)
    return net


OVERWRITE = torch.__future__.set_overwrite_module_params_on_conversion
SWAP = torch.__future__.set_swap_module_params_on_conversion

CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to(dtype)": _converted,
    "to(dtype) that makes new parameters": _with(OVERWRITE, _converted),
    "to(dtype) that swaps parameters": _with(SWAP, _converted),
    "load_state_dict": _loaded,
    "load_state_dict that swaps parameters": _with(SWAP, _loaded),
    "to(device)": lambda net: net.to("cpu"),
    "move_model_to_device": lambda net: tpcore.layers.move_model_to_device(net, "cpu"),
    "deepcopy": copy.deepcopy,
    "load_state_dict(assign=True)": lambda net: _loaded(net, assign=True),
    "to meta and to_empty": _emptied,
    "parameters put in their place": _replaced,
    "half and back": lambda net: net.half().float(),
}


@pytest.mark.parametrize("change", CHANGES)
@each_rank(tp=2)
def test_sharding_survives(ctx: ParallelContext, change: str) -> None:
    """Each of these drops attributes of a parameter, or all of them, somewhere."""
    net = CHANGES[change](nn.Sequential(tpcore.ColumnParallelLinear(4, 8), tpcore.RowParallelLinear(8, 4)))
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    # 32 and 8 of the column layer and 32 of the row layer are sharded; its bias of 4 is whole
    assert tpcore.clip_grad_norm(net.parameters(), 1e9, 1) == 32 + 8 + 32 + 4
    marks = {name: sharding(p) for name, p in net.named_parameters()}
    dims = {name: mark.layout.spec.dim for name, mark in marks.items() if mark is not None}
    assert dims == {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": None}


@pytest.mark.parametrize(
    ("max_norm", "norm_type", "said"),
    [
        (1.0, 0, "norm_type must be a positive number or 'inf', not 0"),
        (1.0, -2, "not -2"),
        (1.0, float("nan"), "not nan"),
        (1.0, "two", "two"),
        (-1.0, 2, "max_norm must be 0 or more, not -1.0"),
        (float("nan"), 2, "not nan"),
    ],
)
@each_rank(tp=2)
def test_impossible_norms_are_refused(ctx: ParallelContext, max_norm: float, norm_type: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tpcore.clip_grad_norm(tpcore.ColumnParallelLinear(4, 4), max_norm, norm_type)


@pytest.mark.parametrize(("tp", "p"), [(1, 2.0), (2, 1.0), (4, 2.0), (4, 3.0), (4, INF)])
@each_rank(tp="tp")
def test_blocks_held_by_different_numbers_of_ranks(ctx: ParallelContext, tp: int, p: float) -> None:
    full = torch.randn(16, 3, dtype=torch.float64)
    layer = Heads()
    layer.weight.grad = layer.shard_specs["weight"].shard(full, ctx.rank, tp)
    norm = tpcore.clip_grad_norm(layer, 0.1, p)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(full, p), rtol=1e-12, atol=0)
    clipped = layer.shard_specs["weight"].shard(full * (0.1 / (norm + 1e-6)), ctx.rank, tp)
    torch.testing.assert_close(layer.weight.grad, clipped, rtol=1e-12, atol=0)


@pytest.mark.parametrize("p", [2.0, INF])
def test_a_table_over_stages_and_what_one_stage_alone_holds(p: float) -> None:
    """pp2 x dp2 x tp2: an embedding over pp x tp, a layer of each stage, a norm that all ranks hold."""
    whole = {name: torch.randn(8, 4, dtype=torch.float64) for name in ("table", "layer0", "layer1", "norm")}
    want = torch.linalg.vector_norm(torch.cat(list(whole.values())), p)

    def rank(ctx: ParallelContext) -> int:
        double = torch.float64
        table = tpcore.ParallelEmbedding(8, 4, dtype=double, group=ctx.comm("pp", "tp"))
        mine = tpcore.ColumnParallelLinear(4, 8, bias=False, dtype=double)
        stage = ctx.coord("pp")
        mine.place(Slot("pp", stage, 2))
        norm = nn.Parameter(torch.zeros(8, 4, dtype=double))
        for parameter, name in ((table.weight, "table"), (mine.weight, f"layer{stage}")):
            found = sharding(parameter)
            assert found is not None
            assert found.axes == ("pp", "tp")
            parameter.grad = found.layout.shard(whole[name], ctx.rank, ctx.mesh)
        norm.grad = whole["norm"].clone()
        got = tpcore.clip_grad_norm([table.weight, mine.weight, norm], 1e9, p)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        return hash(float(got))

    assert len(set(run_ranks(Mesh({"pp": 2, "dp": 2, "tp": 2}), rank))) == 1


class Noting(TransportWrapper):
    """Notes over which axes a sum is taken."""

    def __init__(self, inner: Transport, calls: list[tuple[str, ...]]) -> None:
        self._inner, self._calls = inner, calls
        self.group, self.size, self.position = inner.group, inner.size, inner.position

    def relay(self, primitive: Primitive, x: Tensor, *arguments: Any) -> Tensor:
        self._calls.append(self.group.axes)
        out: Tensor = getattr(self._inner, primitive.name)(x, *arguments)
        return out


@each_rank(pp=2, dp=1, tp=2)
def test_one_all_reduce_for_each_set_of_axes(ctx: ParallelContext) -> None:
    pp_tp = ctx.comm("pp", "tp")
    layers = [tpcore.ColumnParallelLinear(4, 8) for _ in range(3)]
    layers += [tpcore.ColumnParallelLinear(4, 8, group=pp_tp) for _ in range(3)]
    calls: list[tuple[str, ...]] = []
    with ExitStack() as stack:
        for comm in (ctx.comm("tp"), pp_tp):
            stack.enter_context(comm.traced(comm.position, Noting(comm.transport, calls)))
        tpcore.clip_grad_norm(nn.ModuleList(layers), 1.0)
    assert calls == [("pp", "tp"), ("tp",)]


@each_rank(dp=1, tp=4)
def test_a_group_that_no_axes_make_is_summed_over(ctx: ParallelContext) -> None:
    ring = ctx.comm("tp", within=2)
    layer = tpcore.ColumnParallelLinear(4, 8, bias=False, group=ring)
    layer.weight.grad = torch.ones_like(layer.weight)
    found = sharding(layer.weight)
    assert found is not None
    assert (found.axes, found.ctx.mesh) == (("group",), Mesh({"group": 2}))
    assert tpcore.clip_grad_norm(layer, 1e9, 1) == 32


def test_torchs_own_clipping_is_refused_for_what_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPCORE_CHECK", "0")  # it costs no step anything

    def rank(ctx: tpcore.ParallelContext) -> None:
        layer = tpcore.ColumnParallelLinear(4, 8)
        layer(torch.ones(2, 4)).sum().backward()
        assert type(layer.weight) is nn.Parameter
        calls: list[Callable[[Any], object]] = [
            lambda p: nn.utils.clip_grad_norm_(p, 0.1),
            lambda p: clip_grad_norm_(p, 0.1),  # imported before there was a context
            lambda p: get_total_norm(p, foreach=False),
            lambda p: get_total_norm([layer.weight.grad]),
            lambda p: nn.utils.clip_grads_with_norm_(p, 0.1, nn.utils.get_total_norm(layer.weight.grad)),
        ]
        for clip in calls:
            for parameters in (layer.parameters(), list(layer.parameters()), layer.weight):
                with pytest.raises(ValueError, match="norm of this rank's part"):
                    clip(parameters)
        with whole_tensors_only():  # as in a job inside a job
            for by_value in (nn.utils.clip_grad_value_, clip_grad_value_):
                by_value(layer.parameters(), 0.25)  # each entry by itself
        assert layer.weight.grad is not None
        assert float(layer.weight.grad.abs().max()) == 0.25
        assert float(tpcore.clip_grad_norm(layer, 0.1)) > 0.1
        copied = copy.deepcopy(layer).to(torch.float64)
        copied(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        with pytest.raises(ValueError, match="norm of this rank's part"):
            nn.utils.clip_grad_norm_(copied.parameters(), 0.1)
        layer.weight.grad = None
        assert layer.weight.grad is None

    def replicated(ctx: tpcore.ParallelContext) -> None:
        layer = tpcore.ColumnParallelLinear(4, 8)
        layer(torch.ones(2, 4)).sum().backward()
        assert float(nn.utils.clip_grad_norm_(layer.parameters(), 0.1)) > 0.1

    before = dict(vars(nn.utils.clip_grad)), dict(vars(nn.utils))
    run_ranks(Mesh({"tp": 2}), rank)
    run_ranks(Mesh({"tp": 1, "dp": 2}), replicated)
    assert before == (vars(nn.utils.clip_grad), vars(nn.utils))


@pytest.mark.parametrize(
    "parametrize",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
        nn.utils.spectral_norm,
        pytest.param(nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
    ],
)
@each_rank(tp=2)
def test_a_parametrization_of_a_part_is_refused_and_changes_nothing(
    ctx: tpcore.ParallelContext, parametrize: Any
) -> None:
    layer, whole = tpcore.RowParallelLinear(4, 4), nn.Linear(4, 4)
    want = layer(torch.ones(4))
    with pytest.raises(ValueError, match=r"RowParallelLinear.weight is this rank's part, of shape \(4, 2\)"):
        parametrize(layer)
    assert torch.equal(layer(torch.ones(4)), want)
    parametrize(whole)
