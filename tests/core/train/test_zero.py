"""Zero1 steps as the plain optimizer on the whole batch does, whatever the mesh."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.nets import Heads, assert_same_parameters, cut_net, ids_of, loss_of, plain_net
from helpers.tiers import tiers
from helpers.worlds import by_call, each_rank
from torch import Tensor, nn

import tpcore
from tpcore import Mesh, ParallelContext, Zero1
from tpcore.testing import run_ranks

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 5e-3, "momentum": 0.5, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
}
STEPS, BATCH = 10, 12


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups, by the number of dims, the second at another rate."""
    named = list(net.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1]},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "lr": 5e-3},
    ]


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, part: Callable[[Tensor], Tensor], steps: Any, norm: Any
) -> list[Tensor]:
    """The norms, of steps clipped to half of the first one's."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    seen = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, part(ids_of(step, BATCH))).backward()
        seen.append(norm(optimizer))
        schedule.step()
    return seen


def plainly(optimizer: torch.optim.Optimizer) -> Tensor:
    norm = nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.3)
    optimizer.step()
    return norm


def cut(optimizer: torch.optim.Optimizer) -> Tensor:
    return tpcore.optimizer_step(optimizer, max_norm=0.3)


def mine(ctx: ParallelContext) -> Callable[[Tensor], Tensor]:
    return lambda ids: ids.chunk(ctx.comm("dp").size)[ctx.coord("dp")]


def assert_equals(net: nn.Module, plain: nn.Module, ctx: ParallelContext, tolerance: float) -> None:
    want = {name: p.detach() for name, p in plain.named_parameters()}
    assert_same_parameters(net, want, ctx, nn.Parameter.detach, tolerance, tolerance)


@pytest.mark.parametrize("kind", tiers(["adamw", "sgd", "nadam"], OPTIMIZERS))
def test_ten_steps_and_the_state_after_them_are_those_of_the_plain_optimizer(kind: str) -> None:
    cls, options = OPTIMIZERS[kind]
    plain = plain_net()
    full = {k: v.clone() for k, v in plain.state_dict().items()}
    whole = cls(groups_of(plain), **options)
    norms = train(plain, whole, lambda ids: ids, range(STEPS), plainly)
    want = whole.state_dict()
    names = [name for group in want["param_groups"] for name in group["param_names"]]

    def rank(ctx: ParallelContext) -> None:
        net = cut_net(full)
        optimizer = Zero1(cls, groups_of(net), bucket_mb=1e-3, **options)
        seen = train(net, optimizer, mine(ctx), range(STEPS), cut)
        torch.testing.assert_close(torch.stack(seen), torch.stack(norms), rtol=1e-9, atol=0)
        assert_equals(net, plain, ctx, 1e-12)
        got, specs = optimizer.state_dict(), tpcore.layers.shard_specs(net)
        assert [name for group in got["param_groups"] for name in group["param_names"]] == names
        assert got["state"].keys() == want["state"].keys()
        for number, values in want["state"].items():
            spec = specs[names[number]]
            whole_ones = {key: value for key, value in values.items() if value.shape == spec.shape}
            shards = {key: spec.shard(value, ctx.coord("tp"), 2) for key, value in whole_ones.items()}
            torch.testing.assert_close(got["state"][number], values | shards, rtol=1e-10, atol=1e-12)

    run_ranks(Mesh({"dp": 3, "tp": 2}), rank)


@each_rank(dp=4, tp=1)
def test_odd_parameters(ctx: ParallelContext) -> None:
    """Fewer entries than ranks, no dims, none at all, another order in memory, frozen, half precision."""
    double = torch.float64
    params = {
        "few": nn.Parameter(torch.arange(3, dtype=double)),
        "scalar": nn.Parameter(torch.tensor(2.0, dtype=double)),
        "empty": nn.Parameter(torch.zeros(0, 4, dtype=double)),
        "turned": nn.Parameter(torch.arange(12, dtype=double).view(3, 4).t()),
        "frozen": nn.Parameter(torch.ones(4, dtype=double), requires_grad=False),
        "half": nn.Parameter(torch.arange(8, dtype=torch.bfloat16)),
    }
    plain = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in params.items()}
    zero = Zero1(torch.optim.Adagrad, params.items(), lr=0.25, bucket_mb=1e-5)
    want = torch.optim.Adagrad(plain.items(), lr=0.25)
    for step in range(3):
        for some, share in ((params, ctx.rank), (plain, 1.5)):
            for p in some.values():
                if p.requires_grad:
                    p.grad = torch.full_like(p, 1.0 + step + share)
        norm = tpcore.optimizer_step(zero, max_norm=1e9)
        every = torch.cat([p.grad.double().flatten() for p in plain.values() if p.grad is not None])
        torch.testing.assert_close(norm, every.norm())
        want.step()
    for name, p in params.items():
        torch.testing.assert_close(p, plain[name], rtol=1e-14, atol=1e-14)
        assert p.grad is None
    state = zero.state_dict()
    assert state["state"][1]["sum"].shape == ()
    again = Zero1(torch.optim.Adagrad, params.items(), lr=0.25)
    again.load_state_dict(state)
    assert torch.equal(again.state_dict()["state"][1]["sum"], want.state[plain["scalar"]]["sum"])


@each_rank(dp=2, tp=4)
def test_the_norm_counts_entries_that_several_ranks_hold_once(ctx: ParallelContext) -> None:
    full = torch.randn(16, 3, dtype=torch.float64)
    layer = Heads()
    layer.weight.grad = layer.shard_specs["weight"].shard(full, ctx.coord("tp"), ctx.comm("tp").size)
    optimizer = Zero1(torch.optim.SGD, layer.parameters(), lr=1.0)
    optimizer.reduce_gradients()
    for p in (1.0, 2.0, float("inf")):
        torch.testing.assert_close(optimizer.norm(p), torch.linalg.vector_norm(full, p), rtol=1e-12, atol=0)


# -- precision ---------------------------------------------------------------------------------------------
@each_rank(dp=3, tp=1)
def test_masters_keep_what_the_weights_have_no_room_for(ctx: ParallelContext) -> None:
    weight = nn.Parameter(torch.linspace(1, 2, 10).bfloat16())
    start = weight.detach().float()
    optimizer = Zero1(torch.optim.SGD, [("w", weight)], lr=1.0, master_dtype=torch.float32)
    for _ in range(8):
        weight.grad = torch.full_like(weight, 2.0**-11)
        tpcore.optimizer_step(optimizer)
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], start - 2.0**-8)
    assert torch.equal(weight, (start - 2.0**-8).bfloat16())
    with torch.no_grad():
        weight[0] = 5.0  # another hand, or a checkpoint that was loaded: the weights are what counts
    weight.grad = torch.full_like(weight, 2.0**-11)
    tpcore.optimizer_step(optimizer)
    master = optimizer.state_dict()["state"][0]["master"]
    assert master[0] == 5.0 - 2.0**-11
    assert torch.equal(master[1:], start[1:] - 9 * 2.0**-11)


@each_rank(dp=2, tp=1)
def test_gradients_are_summed_in_float32(ctx: ParallelContext) -> None:
    """256 + 1 is 256 in bfloat16, however often."""
    weight = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    dtypes = {"master_dtype": torch.float32, "grad_dtype": torch.float32}
    optimizer = Zero1(torch.optim.SGD, [("w", weight)], lr=1.0, **dtypes)
    for part in (256.0, 1.0, 1.0, float(4 * ctx.coord("dp"))):
        (weight * part).sum().backward()
        assert weight.grad is None
    norm = tpcore.optimizer_step(optimizer, max_norm=1e9)
    assert norm == optimizer.grad_norm
    torch.testing.assert_close(norm, torch.full((6,), 260.0).norm())
    assert (optimizer.state_dict()["state"][0]["master"] == 1 - 260).all()
    (weight * 3).sum().backward()
    optimizer.zero_grad()
    before = weight.detach().clone()
    tpcore.optimizer_step(optimizer)
    assert torch.equal(weight, before)


@each_rank(dp=4, tp=1)
def test_bytes_that_a_rank_holds(ctx: ParallelContext) -> None:
    """AdamW: 8/dp bytes a parameter; with masters 4/dp more; nothing else between steps."""
    for dtype, master, each in ((torch.float32, None, 8), (torch.bfloat16, torch.float32, 12)):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(dtype)
        n = sum(p.numel() for p in model.parameters())
        optimizer = Zero1(torch.optim.AdamW, model.named_parameters(), master_dtype=master)
        model(torch.ones(2, 64, dtype=dtype)).sum().backward()
        tpcore.optimizer_step(optimizer, max_norm=1.0)
        held = [t for values in optimizer.state.values() for t in values.values() if t.ndim]
        assert sum(t.nbytes for t in held) == each * n // 4
        assert sum(c.value.nbytes for c in optimizer._chunks.values()) == (0 if master is None else n)
        assert all(p.grad is None for p in model.parameters())


# -- steps that are skipped --------------------------------------------------------------------------------
def _with(kind: str, net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    if kind == "zero1":
        return Zero1(torch.optim.AdamW, net.named_parameters(), lr=1e-2, **options)
    return torch.optim.AdamW(net.named_parameters(), lr=1e-2)


@pytest.mark.parametrize("kind", ["plain", "zero1"])
@pytest.mark.parametrize(("where", "bad"), [("up.weight", float("nan")), ("norm.weight", float("inf"))])
@each_rank(dp=2, tp=2)
def test_an_infinity_on_one_rank_is_skipped_by_all(ctx: ParallelContext, where: str, kind: str, bad: float) -> None:
    """Of a weight that is sharded, which every rank's norm shows, and of one that is not."""
    full = plain_net().state_dict()
    net = cut_net(full)
    optimizer = _with(kind, net)
    train(net, optimizer, mine(ctx), range(2), cut)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    optimizer.zero_grad()
    loss_of(net, mine(ctx)(ids_of(2, BATCH))).backward()
    if ctx.rank == 1:
        net.get_parameter(where).grad.view(-1)[0] = bad  # type: ignore[union-attr]
    norm = tpcore.optimizer_step(optimizer, skip_nonfinite=True)
    assert norm == float("inf")
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert optimizer.state_dict()["state"][0]["step"] == 2
    optimizer.zero_grad()
    loss_of(net, mine(ctx)(ids_of(2, BATCH))).backward()
    assert tpcore.optimizer_step(optimizer, max_norm=0.3, skip_nonfinite=True).isfinite()
    assert not torch.equal(net.up.weight, before["up.weight"])


@pytest.mark.parametrize("kind", ["plain", "zero1"])
def test_scales_stay_the_same_on_all_ranks(kind: str) -> None:
    """As the whole model's scaler: an overflow on one rank halves the scale of all and skips the step."""
    plain = plain_net()
    full = {k: v.clone() for k, v in plain.state_dict().items()}

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def steps(net: nn.Module, optimizer: Any, part: Any, step: Any, spoil: bool) -> list[float]:
        scaling, scales = scaler(), []
        for i in range(6):
            optimizer.zero_grad()
            scaling.scale(loss_of(net, part(ids_of(i, BATCH)))).backward()
            if i == 2 and spoil:
                net.norm.weight.grad[0] = float("inf")
            step(optimizer, scaling)
            scaling.update()
            scales.append(scaling.get_scale())
        return scales

    def whole(optimizer: torch.optim.Optimizer, scaling: torch.amp.GradScaler) -> None:
        scaling.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.3)
        scaling.step(optimizer)

    want = steps(plain, _with("plain", plain), lambda ids: ids, whole, True)
    assert want == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0]

    def rank(ctx: ParallelContext) -> None:
        net = cut_net(full)

        def step(optimizer: torch.optim.Optimizer, scaling: torch.amp.GradScaler) -> None:
            tpcore.optimizer_step(optimizer, max_norm=0.3, scaler=scaling)

        assert steps(net, _with(kind, net), mine(ctx), step, ctx.rank == 3) == want
        assert_equals(net, plain, ctx, 1e-12)

    run_ranks(Mesh({"dp": 2, "tp": 2}), rank)


@each_rank(dp=2, tp=1)
def test_a_scaler_that_would_decide_alone_is_refused(ctx: ParallelContext) -> None:
    layer = nn.Linear(4, 4)
    optimizer, scaler = Zero1(torch.optim.SGD, layer.named_parameters(), lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(layer(torch.ones(1, 4)).sum()).backward()
    with pytest.raises(ValueError, match=r"optimizer_step\(optimizer, scaler=scaler\)"):
        scaler.step(optimizer)


class Unscaled(Zero1):
    @property
    def scaled(self) -> Any:
        raise AssertionError("reads all parameters: 1 to 2 ms for 500")


@each_rank(dp=2, tp=1)
def test_a_step_without_a_scaler_makes_nothing_for_one(ctx: ParallelContext) -> None:
    layer = nn.Linear(4, 4)
    optimizer = Unscaled(torch.optim.SGD, layer.named_parameters(), lr=1.0)
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        layer(torch.ones(1, 4)).sum().backward()
        tpcore.optimizer_step(optimizer, scaler=scaler)


# -- scripts -----------------------------------------------------------------------------------------------
def test_an_optimizer_made_before_the_model_is_cut() -> None:
    """Whatever gives the parameters other contents, they stay the objects that they are."""
    plain = plain_net()
    full = {k: v.clone() for k, v in plain.state_dict().items()}
    train(plain, torch.optim.AdamW(plain.named_parameters(), lr=1e-2), lambda ids: ids, range(2), plainly)

    def rank(ctx: ParallelContext) -> None:
        net = cut_net(full)
        values = {n: p.detach() for n, p in net.named_parameters()}
        for p in net.parameters():
            p.data = torch.zeros(11, dtype=p.dtype)
        optimizer = Zero1(torch.optim.AdamW, net.named_parameters(), lr=1e-2)
        assert optimizer.state_dict()["state"] == {}
        for name, p in net.named_parameters():
            p.data = values[name]
        train(net, optimizer, mine(ctx), range(2), cut)
        assert_equals(net, plain, ctx, 1e-12)
        net.up.weight.data = torch.zeros(5, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"of 48 entries, .* one of 5 .* before the first step"):
            optimizer.state_dict()

    run_ranks(Mesh({"dp": 2, "tp": 2}), rank)


@each_rank(dp=2, tp=1)
def test_a_group_that_comes_later_and_a_closure(ctx: ParallelContext) -> None:
    first, second = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = Zero1(torch.optim.SGD, [("first", first)], lr=1.0, momentum=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (first * (1 + ctx.rank)).sum() + second.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4 * (1 + ctx.rank) + 4
    optimizer.add_param_group({"params": [("second", second)], "lr": 0.5})
    assert optimizer.param_groups[1]["momentum"] == 0.5
    optimizer.step(closure)
    assert (first == 1 - 1.5 - 1.5 * 1.5).all()
    assert (second == 0.5).all()


@each_rank(dp=2, tp=1)
def test_a_parameter_used_on_one_dp_rank_only(ctx: ParallelContext) -> None:
    some, none = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Zero1(torch.optim.SGD, [("some", some), ("none", none)], lr=1.0, weight_decay=0.5)
    if ctx.coord("dp") == 1:
        some.grad = torch.full((3,), 4.0)
    tpcore.optimizer_step(optimizer, max_norm=1e9)
    assert (some == 1 - 2 - 0.5).all()
    assert (none == 1).all()


# -- errors ------------------------------------------------------------------------------------------------
class Mixes(torch.optim.SGD):
    """Scales by the norm of the whole parameter, and has no name that anybody knows."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad / p.grad.norm()
        super().step()


def elsewhere(ctx: ParallelContext) -> nn.Module:
    other = ParallelContext(type(ctx.backend)(ctx.rank, ctx.backend._world), ctx.mesh, ctx.rank)  # type: ignore[attr-defined]
    with tpcore.use(other):
        return tpcore.ColumnParallelLinear(4, 4, bias=False)


ERRORS = by_call(r"""
Zero1([p], optim.SGD, lr=1.0)
    takes an optimizer's class, the parameters and then its options, not a list first
Zero1(Mixes, [p], lr=1.0)
    Mixes mixes its entries: a step of a whole
Zero1(optim.Adafactor, [p])
    Adafactor mixes
Zero1(optim.SGD, [{"params": [p]}, {"params": [p]}], lr=1.0)
    more than one parameter group
Zero1(optim.SGD, [("p", p), ("q", p)], lr=1.0)
    twice in one group
Zero1(optim.SGD, elsewhere(ctx).named_parameters(), lr=1.0)
    'weight' .* another context
Zero1(optim.SGD, ColumnParallelLinear(4, 4, group=ctx.comm("dp")).named_parameters(), lr=1.0)
    'weight' .* sharded over dp
Zero1(optim.SGD, [p], lr=1.0, bucket_mb=0)
    bucket_mb must be above 0
Zero1(optim.SGD, [p], lr=1.0, master_dtype=torch.int64)
    master_dtype must be
Zero1(optim.SGD, [p], lr=-1.0)
    learning rate
copy.deepcopy(Zero1(optim.SGD, [p], lr=1.0))
    neither copied nor pickled: .* load optimizer.state_dict\(\) into it
pickle.dumps(Zero1(optim.SGD, [p], lr=1.0))
    neither copied nor pickled
optimizer_step(optim.SGD([p], lr=1.0), max_norm=-1)
    max_norm
""")


@pytest.mark.parametrize("call", ERRORS)
@each_rank(dp=2, tp=1)
def test_what_is_refused(ctx: ParallelContext, call: str) -> None:
    names: dict[str, Any] = {"copy": copy, "pickle": pickle}
    names |= {"ctx": ctx, "p": nn.Parameter(torch.ones(4, 4)), "elsewhere": elsewhere, "Mixes": Mixes}
    with pytest.raises((TypeError, ValueError), match=f"(?is){ERRORS[call]}"):
        eval(call, {**vars(tpcore), "torch": torch, "optim": torch.optim, **names})


@each_rank(dp=1, tp=2)
def test_a_state_of_another_shape_is_refused(ctx: ParallelContext) -> None:
    whole = nn.Linear(4, 4)
    whole(torch.ones(1, 4)).sum().backward()
    plain = torch.optim.AdamW(whole.named_parameters())
    plain.step()
    cut_layer = tpcore.ColumnParallelLinear(4, 4)
    with pytest.raises(ValueError, match=r"state\[0\]\.exp_avg has shape \(4, 4\) .* \(2, 4\) .* cuts for this"):
        Zero1(torch.optim.AdamW, cut_layer.named_parameters()).load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="of 2 parameters, and this optimizer has 1"):
        Zero1(torch.optim.AdamW, [cut_layer.weight]).load_state_dict(plain.state_dict())


# -- optimizers made before the model is moved -------------------------------------------------------------
@each_rank(dp=1, tp=2)
def test_moving_keeps_parameters_the_objects_that_they_are(ctx: ParallelContext) -> None:
    """To meta, as to every device whose tensors cannot take the place of the CPU's, torch makes new ones."""
    layer = tpcore.ColumnParallelLinear(4, 4)
    tied = nn.Module()
    tied.a, tied.b = layer, tpcore.ColumnParallelLinear(4, 4)
    tied.b.weight = layer.weight
    weight = layer.weight
    weight.note = "kept"  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(tied.named_parameters())
    tpcore.layers.move_model_to_device(tied, "meta")
    assert weight.is_meta
    assert tied.a.weight is tied.b.weight is weight
    assert weight.note == "kept"  # type: ignore[attr-defined]
    assert optimizer.param_groups[0]["params"][0] is weight

    seen = tpcore.ColumnParallelLinear(4, 4)
    held = weakref.ref(seen.weight)  # torch cannot exchange its contents
    tpcore.layers.move_model_to_device(seen, "meta")
    assert seen.weight.is_meta
    assert held() is not seen.weight

    bare = nn.Module()
    bare._parameters["weight"] = weight = torch.ones(2)  # type: ignore[assignment]
    tpcore.layers.move_model_to_device(bare, "cpu")
    assert bare._parameters["weight"] is weight


@each_rank(dp=2, tp=1)
def test_a_backward_after_the_mean_is_refused(ctx: ParallelContext) -> None:
    """The step would leave its gradients out: clipping is for once, after the last backward."""
    layer = nn.Linear(4, 4)
    optimizer = Zero1(torch.optim.SGD, layer.named_parameters(), lr=0.1)
    layer(torch.ones(1, 4)).sum().backward()
    tpcore.clip_grad_norm(layer, 1.0)
    layer(torch.ones(1, 4)).sum().backward()
    for late in (optimizer.step, lambda: tpcore.clip_grad_norm(layer, 1.0)):
        with pytest.raises(ValueError, match="a backward has run since the mean of this step's gradients"):
            late()
    optimizer.zero_grad()
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
