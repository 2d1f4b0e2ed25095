"""Scripts of NeuronX Distributed's trainer: one training run on every mesh, saved, resumed on another."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.places import TESTS
from helpers.rank_pool import RankPool
from helpers.worlds import each_rank
from torch import Tensor, nn

import tpcore_nxd as nxd
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore_nxd.modules import GQAQKVColumnParallelLinear
from tpcore_nxd.optimizer import NeuronZero1Optimizer
from tpcore_nxd.parallel_layers import grads, layers, loss_functions, pad, parallel_state, random, utils
from tpcore_nxd.pipeline import NxDPPModel
from tpcore_nxd.trainer import NxDModel, NxDOptimizer
from tpcore_nxd.utils import adamw_fp32_optim_params, batch_utils, logger, model_utils


def mesh(tp: int = 1, dp: int = 1, pp: int = 1) -> Mesh:
    return Mesh({"pp": pp, "dp": dp, "tp": tp})


VOCAB, HIDDEN, KV, SIZE = 16, 16, 2, 4  # heads of size 4, two of keys and values


class Norm(nn.Module):
    """A norm of the script's own: its parameters carry the mark, and the optimizer sums their gradients."""

    def __init__(self, marked: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.weight.sequence_parallel_enabled = marked  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    def __init__(self, sequence_parallel: bool, fused: bool, batch_first: bool) -> None:
        super().__init__()
        self.batch_first, tp = batch_first, parallel_state.get_tensor_model_parallel_size()
        options: dict[str, Any] = {"sequence_parallel_enabled": sequence_parallel}
        self.norm = Norm(sequence_parallel)
        grouped = {"kv_size_multiplier": max(1, tp // KV), "fuse_qkv": fused, "gather_output": False}
        self.qkv = GQAQKVColumnParallelLinear(HIDDEN, [HIDDEN, KV * SIZE], bias=False, **grouped, **options)
        self.out = layers.RowParallelLinear(HIDDEN, HIDDEN, False, input_is_parallel=True, **options)
        self.up = layers.ColumnParallelLinear(HIDDEN, 32, gather_output=False, stride=2, **options)
        self.down = layers.RowParallelLinear(16, HIDDEN, input_is_parallel=True, **options)

    def attention(self, x: Tensor) -> Tensor:  # [sequence, batch, hidden], or this rank's tokens of it
        x = x.transpose(0, 1) if self.batch_first else x
        q, k, v = (t.unflatten(-1, (-1, SIZE)).permute(1, 2, 0, 3) for t in self.qkv(x))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.permute(2, 0, 1, 3).flatten(-2))
        return y.transpose(0, 1) if self.batch_first else y

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Llama(nn.Module):
    """``batch_first``: for microbatches, which cut it; else the sequence is first."""

    def __init__(self, sequence_parallel: bool = False, fused: bool = True, batch_first: bool = False) -> None:
        super().__init__()
        self.batch_first, self.turns_ids = batch_first, not (sequence_parallel or batch_first)
        self.embed = layers.ParallelEmbedding(
            VOCAB, HIDDEN, init_method=nn.init.normal_, sequence_parallel_enabled=sequence_parallel
        )
        self.layers = nn.ModuleList(Layer(sequence_parallel, fused, batch_first) for _ in range(2))
        self.head = layers.ColumnParallelLinear(
            HIDDEN, VOCAB, False, gather_output=False, sequence_parallel_enabled=sequence_parallel
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x.transpose(0, 1) if self.turns_ids else x
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x) if self.batch_first else self.head(x).transpose(0, 1)
        return loss_functions.parallel_cross_entropy(logits[:, :-1].contiguous(), labels[:, 1:]).mean()


staged = partial(Llama, batch_first=True)


def batches(steps: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (4, 8), generator=drawn) for _ in range(steps)]


def script(ctx: ParallelContext, folder: Path, resume: bool = False, **options: Any) -> list[float]:
    """What a training script does, from its configuration to its checkpoint: losses and norms."""
    sp, fused = options.pop("sequence_parallel", False), options.pop("fused", True)
    sizes = {f"{name}_parallel_size": ctx.mesh.axes[a] for name, a in (("tensor", "tp"), ("pipeline", "pp"))}
    config = nxd.neuronx_distributed_config(
        **sizes, sequence_parallel=sp, pipeline_config={"num_microbatches": 2}, **options
    )
    torch.manual_seed(0)
    make = staged if ctx.mesh.axes["pp"] > 1 else Llama
    model = nxd.initialize_parallel_model(config, make, False, sp, fused)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    start = 0
    if resume:
        assert nxd.has_checkpoint(folder)
        kept = nxd.load_checkpoint(folder, model=model, optimizer=optimizer, scheduler=scheduler)
        start = kept["step"]
    dp, found = parallel_state.get_data_parallel_size(), []
    for ids in batches(6)[start : start + 3]:
        mine = ids.chunk(dp)[parallel_state.get_data_parallel_rank()]
        loss = model.run_train(mine, mine)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = ctx.comm("dp").all_reduce(loss.detach().reshape(1)) / dp
        assert optimizer.grad_norm is not None
        found += [float(mean), float(optimizer.grad_norm)]
    if not resume:
        nxd.save_checkpoint(folder, "step_3", model, optimizer, scheduler, {"step": 3})
    return found


ZERO = {"optimizer_config": {"zero_one_enabled": True, "max_grad_norm": 0.7}}
CLIP = {"optimizer_config": {"max_grad_norm": 0.7}}
RUNS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "tp": (mesh(tp=2), CLIP),
    "tp above the key heads, not fused": (mesh(tp=4), {**CLIP, "fused": False}),
    "tp x dp with ZeRO-1": (mesh(tp=2, dp=2), ZERO),
    "sequence parallel": (mesh(tp=2), {**CLIP, "sequence_parallel": True}),
    "sequence parallel with ZeRO-1": (mesh(tp=2, dp=2), {**ZERO, "sequence_parallel": True}),
    "tp x pp": (mesh(tp=2, pp=2), CLIP),
    "recomputed": (mesh(tp=2), {**CLIP, "activation_checkpoint_config": "full"}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, list[float], list[float]]]:
    """By fused or not: a run of one process, its checkpoint, and how it goes on from there."""
    made = {}
    for fused in (True, False):
        folder = tmp_path_factory.mktemp("alone")
        run = partial(script, folder=folder, fused=fused, **CLIP)
        made[fused] = folder, run_ranks(mesh(), run)[0], run_ranks(mesh(), partial(run, resume=True))[0]
    return made


@pytest.mark.parametrize("name", RUNS)
def test_a_script_has_the_losses_of_one_process_saved_and_resumed(
    name: str, alone: dict[bool, tuple[Path, list[float], list[float]]], tmp_path: Path
) -> None:
    on, options = RUNS[name]
    fused = options.get("fused", True)
    folder, first, second = alone[fused]
    for got in run_ranks(on, partial(script, folder=tmp_path, **options)):
        assert got == pytest.approx(first, rel=2e-4)  # float32, sums in other orders, Adam's square roots
    for where in (folder, tmp_path):  # written by one process, and by these
        for got in run_ranks(on, partial(script, folder=where, resume=True, **options)):
            assert got == pytest.approx(second, rel=2e-4)
    (back,) = run_ranks(mesh(), partial(script, folder=tmp_path, resume=True, fused=fused, **CLIP))
    assert back == pytest.approx(second, rel=2e-4)


def assert_names_are_the_models(wrapper: Any) -> None:
    model = wrapper.original_module()
    model.register_parameter("own", nn.Parameter(torch.ones(2)))
    model.register_buffer("mask", torch.ones(2))
    assert [*wrapper.named_modules()] == [*model.named_modules()]
    assert wrapper.state_dict().keys() == model.state_dict().keys()
    for recurse in (True, False):
        for of in ("named_parameters", "named_buffers"):
            assert [*getattr(wrapper, of)(recurse=recurse)] == [*getattr(model, of)(recurse=recurse)] != []


# -- the configuration --------------------------------------------------------------------------------------
@each_rank(dp=1, tp=2)
def test_what_a_configuration_cannot_have(ctx: ParallelContext) -> None:
    for given, said in (
        ({"pad_model": True}, "pad=True to the layers"),
        ({"lora_config": {}}, "get_peft_model"),
        ({"lnc_size": 2}, "tp ranks are contiguous"),
        ({"tensor_parallel_size": 4}, "wants tp=4, and the job runs on .*'tp': 2"),
        ({"optimizer_config": {"zero_one": True}}, r"optimizer_config has \['zero_one'\]"),
        ({"mixed_precision_config": {"use_master_weights": True}}, "'zero_one_enabled': True"),
    ):
        with pytest.raises(ValueError, match=said):
            nxd.neuronx_distributed_config(**{"tensor_parallel_size": 2, **given})


@each_rank(dp=1, tp=2)
def test_modules_are_filled_by_param_init_fn(ctx: ParallelContext) -> None:
    def fill(module: nn.Module, device: torch.device) -> None:
        if isinstance(module, layers.BaseParallelLinear | GQAQKVColumnParallelLinear | layers.ParallelEmbedding):
            module.init_weight_cpu()
        elif isinstance(module, Norm):
            module.weight.fill_(2.0)
        else:
            raise RuntimeError(f"no way to fill a {type(module).__name__}")

    init = {"meta_device_init": True, "param_init_fn": fill}
    config = nxd.neuronx_distributed_config(tensor_parallel_size=2, model_init_config=init)
    model = nxd.initialize_parallel_model(config, Llama)
    assert isinstance(model, NxDModel)
    assert model.layers[1].norm.weight.eq(2).all()
    assert_names_are_the_models(model)
    config["model_init_config"]["param_init_fn"] = None
    with pytest.raises(ValueError, match="needs a param_init_fn"):
        nxd.initialize_parallel_model(config, Llama)


# -- checkpoints by tag -------------------------------------------------------------------------------------
@each_rank(dp=1, tp=2)
def test_tags(ctx: ParallelContext, tmp_path: Path) -> None:
    assert not nxd.has_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        nxd.load_checkpoint(tmp_path)
    layer = layers.ColumnParallelLinear(4, 8)
    for step in (9, 10, 11):
        options: dict[str, Any] = {"num_kept_ckpts": 2, "use_xser": True, "async_save": step == 11}
        nxd.save_checkpoint(tmp_path, f"step_{step}", layer, user_content=step, **options)
    nxd.finalize_checkpoint()
    assert nxd.load_checkpoint(tmp_path) == 11
    assert nxd.load_checkpoint(tmp_path, "step_10", model=layer) == 10
    with pytest.raises(CheckpointError, match="was saved without scheduler"):
        nxd.load_checkpoint(tmp_path, scheduler=object())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_11"]


# -- ZeRO-1 by its own name ---------------------------------------------------------------------------------
@each_rank(dp=2, tp=2)
def test_zero1_clips_at_one_unless_switched_off(ctx: ParallelContext, tmp_path: Path) -> None:
    def seeded(make: Any) -> Any:
        torch.manual_seed(0)
        layer = make(4, 8)
        (layer(torch.ones(2, 4)) * 5).square().sum().backward()
        return layer

    sgd = partial(NeuronZero1Optimizer, optimizer_class=torch.optim.SGD, lr=0.1)
    groups = {
        "sharding_groups": parallel_state.get_zero1_sharding_groups(),
        "grad_norm_groups": parallel_state.get_tensor_model_parallel_group(as_list=True),
        "pin_layout": False,
    }
    for options, most in (({"grad_clipping": False}, float("inf")), (groups, 1.0)):
        layer, plain = seeded(layers.ColumnParallelLinear), seeded(nn.Linear)
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), most))
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        optimizer = sgd(layer.named_parameters(), **options)
        optimizer.step()
        part = layer.shard_specs["weight"].shard(plain.weight.detach(), ctx.coord("tp"), 2)
        torch.testing.assert_close(layer.weight.detach(), part)
    assert norm > 1
    assert float(optimizer.grad_norm) == pytest.approx(norm)
    optimizer.save_sharded_state_dict(str(tmp_path / "optim"))
    optimizer.load_sharded_state_dict(str(tmp_path / "optim"))
    optimizer.init_zero()
    with pytest.raises(ValueError, match="sharding_groups"):
        sgd([nn.Parameter(torch.ones(2))], sharding_groups=[[0]])


@each_rank(dp=2, tp=2)
def test_gradients_stay_after_a_step_and_are_not_saved_as_waiting(ctx: ParallelContext, tmp_path: Path) -> None:
    """Scripts print norms of ``.grad`` after the step, and save before or after ``zero_grad``."""
    torch.manual_seed(0)
    layer = layers.ColumnParallelLinear(4, 8)
    optimizer = NeuronZero1Optimizer(layer.named_parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    assert len(optimizer.base_optimizer.param_groups[0]["params"]) == 2

    def run(steps: int, zero: bool = True) -> list[Tensor]:
        for _ in range(steps):
            (layer(torch.full((2, 4), 1.0 + ctx.coord("dp"))) * 5).square().sum().backward()
            optimizer.step()
            grads = [p.grad.clone() for p in layer.parameters()]
            if zero:
                optimizer.zero_grad()
        return grads

    grads = run(1, zero=False)
    assert grads[0].norm() > 1  # this rank's own, not the clipped mean
    nxd.save_checkpoint(tmp_path, "left", layer, optimizer)
    assert torch.equal(layer.weight.grad, grads[0])
    assert not any("gradient" in state for state in optimizer.state_dict()["state"].values())
    optimizer.zero_grad()
    assert layer.weight.grad is None
    want = run(2)
    nxd.load_checkpoint(tmp_path, "left", model=layer, optimizer=optimizer)
    for got, expected in zip(run(2), want, strict=True):
        assert torch.equal(got, expected)
    run(1, zero=False)
    layer(torch.ones(2, 4)).sum().backward()  # added to what was left: a gradient that waits
    with pytest.raises(ValueError, match=r"optimizer\.step"):
        optimizer.state_dict()


@each_rank(dp=2, tp=1)
def test_bfloat16_keeps_masters_and_sums_in_float32(ctx: ParallelContext) -> None:
    config = nxd.neuronx_distributed_config(sequence_parallel=True, optimizer_config={"zero_one_enabled": True})
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    weight.sequence_parallel_enabled = True  # type: ignore[attr-defined]
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.SGD, [weight], lr=1e-3)
    assert isinstance(optimizer, NxDOptimizer)
    for _ in range(3):
        (weight * 0.25).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # three steps of 1e-3 / sqrt(8) or less are below the precision of bfloat16 near 1, and in the master
    assert weight.eq(1).all()
    master = optimizer.state[weight]["master"]
    assert master.dtype == torch.float32
    assert master[:3].lt(1).all()


@pytest.mark.parametrize("how", [list, iter, partial(filter, torch.is_tensor), nn.ParameterList])
@each_rank(dp=2, tp=1)
def test_groups_of_half_precision_are_found_in_whatever_holds_them(ctx: ParallelContext, how: Any) -> None:
    plain, half = (nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    optimizer = NeuronZero1Optimizer(
        [{"params": [plain]}, {"params": how([half]), "lr": 0.5}], torch.optim.SGD, lr=0.1, use_grad_acc_hook=True
    )
    assert [p for group in optimizer.param_groups for p in group["params"]] == [plain, half]
    for gradient in (256, 1):
        (half * gradient).sum().backward()
    optimizer.reduce_gradients()
    assert [t.unique().tolist() for t in optimizer.gradients()] == [[257]]  # which bfloat16 has not


# -- pipelines ----------------------------------------------------------------------------------------------
@each_rank(pp=2, dp=1, tp=1)
def test_what_a_pipeline_cannot_have(ctx: ParallelContext) -> None:
    for options, error, said in (
        ({"virtual_pipeline_size": 2}, ValueError, "interleaved"),
        ({"output_loss_value_spec": (False, True)}, ValueError, "the loss is what forward returns"),
        ({"transformer_layer_cls": nn.Linear}, ValueError, r"list of layers has \['Layer'\]"),
        ({"pipeline_cuts": ["layers.1"]}, ValueError, r"cut after \[0\]"),
        ({"return_mb_loss": True}, ValueError, "the loss of the batch"),
        ({"trace_file_path": "t.json"}, ValueError, "t.json.*no file with a timeline"),
        ({"manual_pp_partition": True}, ValueError, "divided evenly"),
        ({"no_such": 1}, TypeError, "no_such"),
    ):
        with pytest.raises(error, match=said):
            NxDPPModel(staged(), num_microbatches=2, **options)  # type: ignore[arg-type]
    model = NxDPPModel(
        staged(),
        transformer_layer_cls=Layer,
        num_microbatches=2,
        output_loss_value_spec=True,
        pipeline_cuts=["layers.0"],
        auto_partition=False,
        trace_file_path=None,
        manual_pp_partition=False,
    )
    ids = batches(1)[0]
    assert float(model.run_eval(ids, labels=ids)) == pytest.approx(float(model.run_train(ids, labels=ids)))
    mine = {name for name, _ in model.local_named_parameters()}
    assert f"layers.{ctx.coord('pp')}.norm.weight" in mine
    assert mine == set(model.local_state_dict())
    assert_names_are_the_models(model)


def test_a_pipeline_without_a_trainer_takes_the_mean_over_dp() -> None:
    """With any optimizer, as its guide has it; ``broadcast_and_average_loss`` asks for the loss's mean as well."""

    def step(ctx: ParallelContext, **options: bool) -> tuple[float, Tensor]:
        torch.manual_seed(7)
        model = NxDPPModel(staged(), Layer, 2, **options)
        model.move_model_to_device()
        assert "layers" in dict(model.local_named_modules())
        module = model.original_torch_module
        assert list(model.local_modules()) == list(module.modules())
        assert list(model.local_children()) == [child for _, child in model.local_named_children()]
        assert list(model.local_children()) == list(module.children())
        assert list(model.local_buffers()) == [t for _, t in model.local_named_buffers()] == list(module.buffers())
        mine = torch.cat(batches(2)).chunk(ctx.mesh.axes["dp"])[ctx.coord("dp")]
        loss = model.run_train(mine, labels=mine)
        torch.optim.SGD(model.local_parameters(), lr=1.0).step()
        return float(loss), model.head.weight.detach()

    ((loss, want),) = run_ranks(mesh(), step)
    ends = run_ranks(mesh(pp=2, dp=2), lambda ctx: step(ctx, broadcast_and_average_loss=True))
    for mean, head in ends:
        assert mean == pytest.approx(loss, rel=1e-5)  # float32, microbatches
        torch.testing.assert_close(head, want)
    left = run_ranks(mesh(dp=2), lambda ctx: step(ctx, use_zero1_optimizer=True))
    assert not torch.equal(left[0][1], left[1][1])
    assert left[0][0] != left[1][0]


def test_stages_that_scripts_seed_differently_are_one_model() -> None:
    """Published scripts add 100 times the stage to their seed; embedding and head are on every stage."""

    def check(ctx: ParallelContext, trainer: bool = True) -> tuple[float, Tensor]:
        torch.manual_seed(7 + 100 * ctx.coord("pp"))
        options: dict[str, Any] = {"num_microbatches": 2}
        if trainer:
            stages = ctx.mesh.axes["pp"]
            config = nxd.neuronx_distributed_config(pipeline_parallel_size=stages, pipeline_config=options)
        model = nxd.initialize_parallel_model(config, staged) if trainer else NxDPPModel(staged(), **options)
        return float(model.run_train(batches(1)[0], batches(1)[0])), model.head.weight.detach()

    ((loss, head),) = run_ranks(mesh(), check)
    for mine, its_head in run_ranks(mesh(pp=2), check):
        assert torch.equal(its_head, head)
        assert mine == pytest.approx(loss, rel=1e-5)  # float32, microbatches
    (first, its_head), (second, other) = run_ranks(mesh(pp=2), partial(check, trainer=False))
    assert torch.equal(its_head, head)
    assert torch.equal(other, head)
    assert first == second


# -- gradients by hand --------------------------------------------------------------------------------------
@each_rank(dp=2, tp=2)
def test_gradients_by_hand(ctx: ParallelContext) -> None:
    rank = ctx.rank
    given = [torch.full((3,), float(rank)), torch.full((2, 2), float(rank), dtype=torch.bfloat16)]
    grads.bucket_allreduce_gradients(given)
    grads.bucket_allreduce_gradients(given, reduce_over_ep_group=True)
    assert [t.unique().tolist() for t in given] == [[(rank % 2) + 1.0]] * 2  # mean over [0, 2] or [1, 3]

    layer = layers.ColumnParallelLinear(4, 8)
    layer(torch.ones(2, 4)).square().sum().backward()
    before = [p.grad.clone() for p in layer.parameters()]
    norm = grads.get_grad_norm(layer.parameters())
    assert all(torch.equal(p.grad, g) for p, g in zip(layer.parameters(), before, strict=True))
    grads.clip_grads_with_norm(layer.parameters(), norm, float(norm) / 2)
    assert float(grads.get_grad_norm(layer)) == pytest.approx(float(norm) / 2, rel=1e-4)
    again = grads.clip_grad_norm(layer.parameters(), 1.0, 2, False, None, True)
    assert float(again) == pytest.approx(float(norm) / 2, rel=1e-4)
    with pytest.raises(ValueError, match=r"tpcore\.Zero1"):
        grads.clip_grad_norm(layer.parameters(), 1.0, zero1_optimizer=True)


@each_rank(dp=1, tp=2)
def test_log_probabilities_of_the_next_tokens(ctx: ParallelContext) -> None:
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 12, generator=drawn, dtype=torch.float64)
    target = torch.randint(12, (2, 5), generator=drawn)
    part = logits.chunk(2, -1)[ctx.coord("tp")].clone().requires_grad_()
    want = logits.log_softmax(-1)[:, :-1].gather(-1, target[:, 1:, None]).squeeze(-1)
    for inference in (True, False):
        got = loss_functions.from_parallel_logits_to_logprobs(part, target, inference)
        torch.testing.assert_close(got, want, check_dtype=False)
        assert got.requires_grad is not inference


@each_rank(dp=1, tp=4)
def test_grouped_projections_are_those_of_plain_ones(ctx: ParallelContext) -> None:
    """tp above the number of key heads: two ranks hold each, and q's heads are in the model's own order."""
    torch.manual_seed(0)
    layer = GQAQKVColumnParallelLinear(6, [8, 4], bias=True, kv_size_multiplier=2, fuse_qkv=False)
    torch.manual_seed(0)
    plain: dict[str, Tensor] = {}
    for name, size in (("q", 8), ("k", 4), ("v", 4)):
        linear = nn.Linear(6, size)
        plain[f"weight_{name}"], plain[f"bias_{name}"] = linear.weight, linear.bias
    x = torch.randn(3, 6)
    want = [nn.functional.linear(x, plain[f"weight_{n}"], plain[f"bias_{n}"]) for n in "qkv"]
    for got, expected in zip(layer(x), want, strict=True):
        torch.testing.assert_close(got, expected)
    assert layer.q_output_size_per_partition == 2
    with pytest.raises(ValueError, match="kv_size_multiplier=3"):
        GQAQKVColumnParallelLinear(6, [8, 4], kv_size_multiplier=3)


# -- small names --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_a_dtype_of_none_is_torchs_default(default: torch.dtype) -> None:
    def check(ctx: ParallelContext) -> None:
        column = layers.ColumnParallelLinear(4, 8, dtype=None, keep_master_weight=True)
        others = layers.RowParallelLinear(4, 8, dtype=None), layers.ParallelEmbedding(4, 8, dtype=None)
        made = (column, *others, GQAQKVColumnParallelLinear(4, [4, 4], dtype=None))
        assert {p.dtype for layer in made for p in layer.parameters()} == {default}
        assert column.master_weight.dtype == default

    torch.set_default_dtype(default)
    try:
        run_ranks(mesh(tp=2), check)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_device_and_the_end_of_a_step_need_no_context() -> None:
    assert nxd.utils.cpu_mode()
    assert nxd.utils.get_device() == torch.device("cpu")
    nxd.utils.mark_step()


def test_what_a_script_logs_is_seen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    logger.get_logger("a script").info("resumed at %d", 6)
    monkeypatch.undo()
    logger.get_logger("a script").info("the program's handlers have this one")
    assert capsys.readouterr().err == "a script[0]: resumed at 6\n"


def test_small_names(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    def check(ctx: ParallelContext) -> None:
        nxd.utils.master_print("once")
        logger.get_logger().warning("by the first")
        assert batch_utils.get_batch_on_this_context_parallel_rank({"a": 1}) == {"a": 1}
        assert model_utils.move_model_to_device is nxd.move_model_to_device
        assert utils.get_local_world_size() == 1
        assert not utils.requires_init_pg_override()
        assert not utils.is_pjrt_device()
        assert [utils.get_padding_length(n, 4) for n in (7, 8)] == [1, 0]
        assert [pad.get_number_of_extra_heads(n, 8) for n in (12, 16)] == [4, 0]
        assert utils.EmbeddingUtility.range_from_global_vocab_size(12, 1, 2) == (6, 12)
        moved = utils.move_all_tensor_to_cpu({"a": [torch.ones(1), 2]})
        assert moved["a"][1] == 2
        assert utils.param_is_not_tensor_parallel_duplicate(torch.ones(1)) is (ctx.coord("tp") == 0)
        tracker = random.get_xla_rng_tracker()
        tracker.reset()
        tracker.add("mine", 7)
        states = tracker.get_states()
        with tracker.fork("mine"):
            first = torch.rand(3)
        tracker.set_states(states)
        with tracker.fork():
            assert torch.equal(torch.rand(3), first)
        collected = parallel_state.gather_python_object({"rank": ctx.rank, "at": [0.5] * ctx.rank})
        assert collected == ([{"rank": 0, "at": []}, {"rank": 1, "at": [0.5]}] if ctx.rank == 0 else [])
        world = parallel_state.get_world_group()
        assert len(parallel_state.gather_python_object(ctx.rank, world)) == (2 if ctx.rank == 0 else 0)

    with caplog.at_level(logging.WARNING):
        run_ranks(mesh(tp=2), check)
    assert capsys.readouterr().out == "once\n"
    assert [record.message for record in caplog.records] == ["by the first"]


def test_adamw_in_float32_is_torchs_where_it_can_be_compared() -> None:
    torch.manual_seed(0)
    mine, theirs = (nn.Parameter(t) for t in torch.randn(7, dtype=torch.float32).repeat(2, 1).unbind())
    ours = adamw_fp32_optim_params.AdamW_FP32OptimParams([mine], lr=0.1, eps=1e-8)
    plain = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.0)
    half = nn.Parameter(mine.detach().bfloat16())
    other = adamw_fp32_optim_params.AdamW_FP32OptimParams([half], lr=0.1, weight_decay=0.1, correct_bias=False)
    for optimizer in (ours, plain, other):
        for step in range(3):
            for p in (mine, theirs, half):
                p.grad = torch.full_like(p, 0.1 * (step + 1))
            optimizer.step()
    torch.testing.assert_close(mine, theirs)  # float32
    assert other.state[half]["exp_avg"].dtype == torch.float32
    before = half.clone()  # a warm-up begins with a rate of 0
    adamw_fp32_optim_params.AdamW_FP32OptimParams([half], lr=0.0, eps=0.0, weight_decay=0.1).step()
    assert half.equal(before)


# -- a whole script that imports neuronx_distributed, over gloo in processes --------------------------------------
SCRIPTS = str(TESTS / "scripts")


def bert(ctx: ParallelContext, scripts: str, folder: str, resume: bool) -> list[float]:
    """The script's ``train`` on this rank, imported as it stands."""
    sys.path.insert(0, scripts)
    try:
        from nxd_imports import installed  # type: ignore[import-not-found]

        installed()
        import nxd_bert  # type: ignore[import-not-found]
    finally:
        sys.path.remove(scripts)
    flags = Namespace(output_dir=folder, steps=3, lr=0.01, resume=resume, tensor_parallel_size=0)
    losses: list[float] = nxd_bert.train(flags)
    return losses


def test_a_bert_script_trains_saves_beside_its_logs_and_resumes(pool: RankPool, tmp_path: Path) -> None:
    def alone(resume: bool) -> Any:
        return run_ranks(mesh(), lambda ctx: bert(ctx, SCRIPTS, str(tmp_path / "alone"), resume))[0]

    first, second = alone(False), alone(True)
    assert first[0] > first[-1]
    for name, on in (("tp", mesh(tp=2)), ("both", mesh(tp=2, dp=2))):
        folder = str(tmp_path / name)
        for resume, want in ((False, first), (True, second)):
            for got in pool.run(on, bert, SCRIPTS, folder, resume):
                assert got == pytest.approx(want, rel=2e-4)  # float32, sums in other orders
        assert (tmp_path / name / "events.log").read_text().count("\n") == 2 * on.size


class Scaled(nn.Module):
    """A model with parameters, a buffer and a flag of its own beside its children."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.zeros(4))
        self.layer = layers.ColumnParallelLinear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x) * self.scale + self.offset, 0.5, self.training)


def test_modes_dtypes_and_functions_reach_the_model_itself() -> None:
    def check(ctx: ParallelContext) -> None:
        model = nxd.initialize_parallel_model(nxd.neuronx_distributed_config(), Scaled)
        x = torch.ones(2, 4)
        assert model.eval() is model
        assert not model.training
        assert not any(module.training for module in model.modules())
        assert torch.equal(model.run_eval(x), model.run_eval(x))
        assert model.train() is model
        assert all(module.training for module in model.modules())
        model.double()
        assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {torch.float64}
        seen: list[nn.Module] = []
        model.apply(seen.append)
        assert seen == [model.layer, model.original_module()]

    run_ranks(mesh(), check)


def test_gradients_by_hand_with_experts_over_ep() -> None:
    """All gradients over the ranks of the same experts, then those of the rest over ep."""

    def check(ctx: ParallelContext) -> None:
        ep, dp = ctx.coord("ep"), ctx.coord("dp")
        expert, rest = torch.tensor([1.0 + 10 * ep + 100 * dp]), torch.tensor([float(ctx.rank)])
        grads.bucket_allreduce_gradients([rest, expert])
        grads.bucket_allreduce_gradients([rest], reduce_over_ep_group=True)
        assert float(expert) == (1 + 101) / 2 + 10 * ep  # a mean over ep already
        assert float(rest) == (0 + 1 + 2 + 3) / 4

    run_ranks(Mesh({"pp": 1, "dp": 2, "ep": 2, "tp": 1}), check)


def test_norm_types_and_stages_that_are_none() -> None:
    def check(ctx: ParallelContext) -> None:
        p = nn.Parameter(torch.ones(2))
        p.grad = torch.ones(2)
        for norm_type in (0, -2.0):
            with pytest.raises(ValueError, match="norm_type must be a positive number"):
                grads.get_grad_norm([p], norm_type)
        norm = grads.get_grad_norm([p])
        assert grads.clip_grads_with_norm([p], norm, 1.0) is norm
        with pytest.raises(ValueError, match="there are 1 pipeline stages"):
            parallel_state.create_pg_with_ranks([0, 5])

    run_ranks(mesh(), check)
