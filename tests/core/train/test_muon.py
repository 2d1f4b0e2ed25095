"""Muon on every mesh steps as torch's own does on the whole matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import pipelines
from helpers.nets import cut_net, ids_of, loss_of, plain_net, widen_muon
from helpers.worlds import each_rank
from test_pipeline_steps import staged, trained
from test_zero import assert_equals, cut, mine, train
from torch import Tensor, nn

import tpcore
from tpcore import Mesh, ParallelContext, Zero1
from tpcore.layers.sharding import Sharding, stamp
from tpcore.layout.layout import AxisCut, Layout, Slot
from tpcore.layout.shard import Block, ShardSpec
from tpcore.testing import run_ranks
from tpcore.train.muon.matrices import NewtonSchulz
from tpcore.train.muon.optimizer import default_rule

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
MATRICES = ("up.weight", "down.weight", "unused.weight")
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
ADAMW: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.05}
STEPS = 20


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    widen_muon(monkeypatch)


class Both:
    """torch's Muon and AdamW, each over its own parameters, stepped together."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], matrices: tuple[str, ...], **options: Any) -> None:
        muon = [p for name, p in named if name in matrices]
        self.muon = torch.optim.Muon(muon, **{**OPTIONS, **options})
        self.adamw = torch.optim.AdamW([p for name, p in named if name not in matrices], **ADAMW)

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()


def whole_steps(plain: nn.Module, steps: int, matrices: tuple[str, ...] = MATRICES, **options: Any) -> list[Tensor]:
    """The norms of steps of both, clipped, with one schedule for both."""
    both = Both(list(plain.named_parameters()), matrices, **options)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + 0.1 * s)) for o in (both.muon, both.adamw)]
    norms = []
    for step in range(steps):
        plain.zero_grad()
        loss_of(plain, ids_of(step, 12)).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.3))
        both.step()
        for schedule in schedules:
            schedule.step()
    return norms


def muon(model: nn.Module, **options: Any) -> tpcore.Muon:
    return tpcore.Muon(model.named_parameters(), ns_dtype=torch.float64, adamw=ADAMW, **{**OPTIONS, **options})


def zero1(model: nn.Module, **options: Any) -> Zero1:
    options = {**OPTIONS, **options, "ns_dtype": torch.float64, "adamw": ADAMW}
    return Zero1(tpcore.Muon, model.named_parameters(), bucket_mb=1e-3, **options)


MESHES = ({"tp": 2}, {"tp": 4}, {"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 3, "tp": 2})


@pytest.mark.parametrize("make", [muon, zero1])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_twenty_clipped_steps_are_those_of_torch_on_the_whole(wide: None, axes: dict[str, int], make: Any) -> None:
    adjust = None if axes != {"tp": 4} else "match_rms_adamw"
    plain = plain_net()
    full = {k: v.clone() for k, v in plain.state_dict().items()}
    norms = whole_steps(plain, STEPS, adjust_lr_fn=adjust, nesterov=make is muon)

    def rank(ctx: ParallelContext) -> None:
        net = cut_net(full)
        optimizer = make(net, adjust_lr_fn=adjust, nesterov=make is muon)
        seen = train(net, optimizer, mine(ctx), range(STEPS), cut)
        torch.testing.assert_close(torch.stack(seen), torch.stack(norms), rtol=1e-9, atol=0)
        # 1e-9: the iteration takes singular values from near zero to one, and the rounding of sums with them
        assert_equals(net, plain, ctx, 1e-9)

    run_ranks(Mesh({"dp": 1, "tp": 1, **axes}), rank)


QKV = ShardSpec((16, 6), 0, (Block(8, 2), Block(4, 2, replicate=True), Block(4, 2, replicate=True)))
EP = AxisCut(("ep",), ShardSpec((6, 10, 4), 0))
LAYOUTS = {
    "q, k and v, of which ranks share key heads": Layout.of(QKV, "tp"),
    "gate and up, padded": Layout.of(ShardSpec((10, 4), 0, (Block(5), Block(5))), "tp"),
    "columns": Layout.of(ShardSpec((5, 12), 1), "tp"),
    "whole": Layout((7, 3)),
    "a layer of a stage": Layout((7, 3), slot=Slot("pp", 0, 1)),
    "experts": Layout((6, 10, 4), (EP,)),
    "experts, features of each": Layout((6, 10, 4), (AxisCut(("tp",), ShardSpec((6, 10, 4), 1)), EP)),
    "experts, over tp and ep": Layout((6, 10, 4), (AxisCut(("tp",), ShardSpec((6, 10, 4), 0)), EP)),
}


def rounds_of_torch(layout: Layout, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(before, gradient, after a step) of each of ``count`` parameters: of a stack each matrix by itself."""
    rng, made = torch.Generator().manual_seed(1), []
    for _ in range(count):
        before, grad = (torch.randn(layout.shape, dtype=torch.float64, generator=rng) for _ in range(2))
        matrices = [nn.Parameter(m.clone()) for m in before.view(-1, *layout.shape[-2:])]
        for matrix, g in zip(matrices, grad.view(-1, *layout.shape[-2:]), strict=True):
            matrix.grad = g
        torch.optim.Muon(matrices, lr=0.1).step()
        made.append((before, grad, torch.stack([m.detach() for m in matrices]).view(layout.shape)))
    return made


AXES = ({"tp": 4}, {"dp": 2, "tp": 2}, {"pp": 1, "ep": 2, "tp": 2}, {"dp": 2, "ep": 3}, {"ep": 2, "cp": 2})


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_matrix_of_any_layout_is_orthogonalized_whole_and_once(
    wide: None, axes: dict[str, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, count = LAYOUTS[name], 5
    mesh, orthogonalized = Mesh({"pp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 1, **axes}), []
    want = rounds_of_torch(layout, count)
    plain = NewtonSchulz.__call__

    def counted(self: NewtonSchulz, matrix: Tensor) -> Tensor:
        orthogonalized.extend([1] if matrix.any() else [])
        return plain(self, matrix)

    monkeypatch.setattr(NewtonSchulz, "__call__", counted)

    def rank(ctx: ParallelContext) -> None:
        params = {}
        for i, (before, grad, _) in enumerate(want):
            p = params[f"experts.{i}"] = nn.Parameter(layout.shard(before, ctx.rank, mesh))
            p.grad = layout.shard(grad, ctx.rank, mesh)
            stamp(p, Sharding(layout, ctx))
        tpcore.Muon(params.items(), lr=0.1, ns_dtype=torch.float64).step()
        for p, (_, _, after) in zip(params.values(), want, strict=True):
            torch.testing.assert_close(p.detach(), layout.shard(after, ctx.rank, mesh), rtol=1e-9, atol=1e-9)

    run_ranks(mesh, rank)
    assert len(orthogonalized) == count * (layout.shape[0] if len(layout.shape) > 2 else 1)


@each_rank(dp=1, tp=1)
def test_on_one_rank_the_bits_are_those_of_torch(ctx: ParallelContext) -> None:
    ours, theirs = (plain_net().float() for _ in range(2))
    optimizer = tpcore.Muon(ours.named_parameters(), adamw=ADAMW, **OPTIONS)
    both = Both(list(theirs.named_parameters()), MATRICES)
    for step in range(3):
        for net, made in ((ours, optimizer), (theirs, both)):
            net.zero_grad()
            loss_of(net, ids_of(step)).backward()
            made.step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize(
    ("axes", "tied", "make"), [({"dp": 2, "tp": 1}, True, muon), ({"dp": 1, "tp": 2}, False, zero1)]
)
def test_stages_of_a_pipeline_step_as_the_whole_and_their_checkpoint_opens_on_one(
    wide: None, tmp_path: Path, axes: dict[str, int], tied: bool, make: Any
) -> None:
    """Untied, also the head is Muon's, which is sharded over stages and tp."""
    dense, want = pipelines.plain(4, tied=tied), []
    matrices = tuple(n for n, p in dense.named_parameters() if p.ndim == 2 and not n.startswith("embed"))

    def rule(name: str, p: Tensor) -> str | None:
        return "muon" if name == "head.weight" else None

    both = Both(list(dense.named_parameters()), matrices)
    for step in range(6):
        dense.zero_grad()
        loss = dense(**pipelines.batch_of(8, step))
        loss.backward()
        want += [loss.item(), nn.utils.clip_grad_norm_(dense.parameters(), 0.5).item()]
        both.step()

    def rank(ctx: ParallelContext) -> list[float]:
        first, steps = ctx.mesh.axes["pp"] > 1, range(4)
        model = staged(ctx, tied=tied)
        optimizer = make(model, rule=rule)
        if not first:
            tpcore.checkpoint.load(tmp_path / "c", model, optimizer=optimizer)
            steps = range(4, 6)
        seen = trained(model, optimizer, ctx, "recomputed", steps)
        if first:
            tpcore.checkpoint.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "c")
        return seen

    for got in run_ranks(Mesh({"pp": 2, **axes}), rank):
        torch.testing.assert_close(got, want[:8], rtol=1e-9, atol=1e-9)
    for got in run_ranks(Mesh({"pp": 1, "dp": 2, "tp": 2}), rank):
        torch.testing.assert_close(got, want[8:], rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("wide")
@each_rank(dp=2, tp=2)
def test_blocks_are_orthogonalized_by_themselves(ctx: ParallelContext) -> None:
    """Each rank's part as a matrix of its own, with its own shape; no collective over tp."""
    before, grad = (torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    layout = Layout.of(ShardSpec((6, 8), 0), "tp")
    ours, theirs = (nn.Parameter(layout.shard(before, ctx.rank, ctx.mesh)) for _ in range(2))
    ours.grad = theirs.grad = layout.shard(grad, ctx.rank, ctx.mesh)
    stamp(ours, Sharding(layout, ctx))
    tpcore.Muon([("up", ours)], 0.1, ns_dtype=torch.float64, rule=lambda name, p: "blocks").step()
    torch.optim.Muon([theirs], 0.1).step()
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_which_parameters_are_muons() -> None:
    """By names of transformers and torch."""
    dims = {"conv1d.weight": 3, "conv.weight": 4, "norm.weight": 1, "mlp.experts.gate_up_proj": 3}
    names = {
        "muon": "layers.0.q_proj.weight layers.0.lora_A.default.weight mlp.shared_expert.up_proj.weight "
        "mlp.experts.gate_up_proj router.weight attn.in_proj_weight attention.output.dense.weight h.0.c_attn.weight",
        "adamw": "embed_tokens.weight lm_head.weight wte.weight embeddings.word_embeddings.weight shared.weight "
        "score.modules_to_save.default.weight norm.weight conv1d.weight conv.weight mlp.experts.gate_up_proj_bias "
        "mixer.A_log lora_embedding_A.default",
    }
    for rule, of_rule in names.items():
        for name in of_rule.split():
            assert default_rule(name, torch.empty((2,) * dims.get(name, 2))) == rule, name


def add_to_zero1(model: nn.Module) -> None:
    optimizer = Zero1(tpcore.Muon, [("weight", model.weight)])
    optimizer.add_param_group({"params": [("bias", model.bias)]})
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def stepped_as(model: nn.Module, layout: Layout) -> None:
    optimizer = tpcore.Muon(model.named_parameters())
    stamp(model.weight, Sharding(layout, tpcore.current()))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def other_shape(model: nn.Module) -> None:
    stepped_as(model, Layout.of(ShardSpec((6, 4), 0), "tp"))


def twice(model: nn.Module) -> None:
    rows, columns = ShardSpec((4, 8), 0), ShardSpec((4, 8), 1)
    stepped_as(model, Layout((4, 8), (AxisCut(("tp",), rows), AxisCut(("dp",), columns))))


ERRORS: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "no names": (
        lambda m: tpcore.Muon(m.parameters()),
        ValueError,
        r"parameters 0, 1 have no names, .* pass model.named_parameters\(\)",
    ),
    "no tensors": (lambda m: tpcore.Muon([("w", "up")]), TypeError, "parameter 'w' is a str and no tensor"),
    "names alone": (lambda m: tpcore.Muon(dict(m.named_parameters())), TypeError, "'weight'|parameter 0 is a str|str"),
    "another rule": (
        lambda m: tpcore.Muon(m.named_parameters(), rule=lambda name, p: "sgd"),
        ValueError,
        "parameters 'weight', 'bias' have the rule 'sgd': there are muon, blocks, adamw",
    ),
    "a vector": (
        lambda m: tpcore.Muon(m.named_parameters(), rule=lambda name, p: "muon"),
        ValueError,
        r"parameter 'bias' of shape \(2,\) is no matrix .* rule \"adamw\"",
    ),
    "given twice": (lambda m: tpcore.Muon([("a", m.weight), ("b", m.weight)]), ValueError, "'b' is given twice"),
    "lr": (lambda m: tpcore.Muon(m.named_parameters(), lr=-1.0), ValueError, "learning rate: -1.0"),
    "momentum": (lambda m: tpcore.Muon(m.named_parameters(), momentum=-1), ValueError, "momentum must be .* -1"),
    "steps": (lambda m: tpcore.Muon(m.named_parameters(), ns_steps=100), ValueError, "ns_steps=100"),
    "adjustment": (
        lambda m: tpcore.Muon(m.named_parameters(), adjust_lr_fn="keller"),
        ValueError,
        "one of original, match_rms_adamw, not 'keller'",
    ),
    "dtype": (lambda m: tpcore.Muon(m.named_parameters(), ns_dtype=torch.int32), ValueError, "not torch.int32"),
    "a state of AdamW": (
        lambda m: tpcore.Muon(m.named_parameters()).load_state_dict(
            torch.optim.AdamW(m.named_parameters()).state_dict()
        ),
        ValueError,
        r"rules \[None\], and this Muon's have \['muon', 'adamw'\]",
    ),
    "a group for a Zero1": (add_to_zero1, ValueError, "a group that is added to a Zero1 of Muon says its rule"),
    "a part of another shape": (
        other_shape,
        ValueError,
        r"parameter 'weight' has shape \(2, 4\), and its layout 6x4 .* gives this rank \(3, 4\)",
    ),
    "sharded twice": (twice, ValueError, "'weight' is sharded as .*, more than once"),
}


@pytest.mark.parametrize("case", ERRORS)
@each_rank(dp=2, tp=2)
def test_what_cannot_be_stepped_is_refused_on_every_rank(ctx: ParallelContext, case: str) -> None:
    run, error, said = ERRORS[case]
    with pytest.raises(error, match=said):
        run(nn.Linear(4, 2))
