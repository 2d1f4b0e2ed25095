"""Linear weights of eight bits: the same model at every degree, in memory, in checkpoints and under adapters."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.hf import GPT2, double, llama, part, refused, text
from helpers.worlds import each_rank
from torch import Tensor, nn
from transformers.utils.quantization_config import QuantizationMethod

import tpcore
import tpcore_hf
from tpcore.layers import quantized
from tpcore.layers.quantized import DTYPES, QuantizedLinear
from tpcore.layers.sharding import sharding
from tpcore.layout.mesh import Mesh
from tpcore.testing import run_ranks
from tpcore_convert.rewrite import consolidate
from tpcore_hf.shard import quantized as quantized_model

# peft asks transformers by a name that it has given up
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
TWO = Mesh({"tp": 2})
EXACT = 1e-12  # float64: another order of summation
INPUT = {name: t for name, t in text().items() if name != "labels"}
INT8, FP8 = torch.int8, torch.float8_e4m3fn


def made(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return double(llama)


def alone(dtype: torch.dtype, seed: int = 0) -> Any:
    """The quantized model of one process."""
    return run_ranks(Mesh({"tp": 1}), lambda _: tpcore.parallelize(made(seed), quantize=dtype))[0]


@pytest.mark.parametrize(("dtype", "tp", "cuts"), [(INT8, 2, {"sequence_parallel": True}), (INT8, 4, {}), (FP8, 2, {})])
def test_every_degree_is_the_same_model(dtype: torch.dtype, tp: int, cuts: dict[str, Any]) -> None:
    """tp=4 has more ranks than heads of keys and values."""
    whole = alone(dtype)
    tensors, want = whole.state_dict(), whole(**INPUT).logits.detach()
    exact = made()(**INPUT).logits
    # half a step of 1/127 (of fp8: 1/16 of a value) in each weight; measured 0.4% and 1.8%
    assert 0 < (want - exact).norm() / exact.norm() < (0.01 if dtype is INT8 else 0.05)

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(made(), quantize=dtype, **cuts)
        mine = model.state_dict(keep_vars=True)
        assert mine.keys() == tensors.keys()
        for name, p in mine.items():
            assert torch.equal(p.float(), part(tensors[name], p).float()), name
        assert {m.weight.dtype for _, m in _quantized(model)} == {dtype}
        torch.testing.assert_close(model(**INPUT).logits, want, rtol=0, atol=EXACT)

    run_ranks(Mesh({"tp": tp}), rank)


def _quantized(model: nn.Module) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in model.named_modules() if getattr(m, "weight_scale", None) is not None]


def test_each_layer_of_files_is_quantized_before_the_next_has_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made().save_pretrained(tmp_path)
    whole = alone(INT8).state_dict()

    def rank(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        tpcore.parallelize(model, quantize=INT8)
        for name, p in model.state_dict(keep_vars=True).items():
            assert torch.equal(p, part(whole[name], p)), name

    run_ranks(TWO, rank)
    gc.collect()
    gc.freeze()  # with_memory passes over what is there already, hundreds of thousands of objects
    held, freeze = [], quantized_model.freeze
    monkeypatch.setattr(quantized_model, "freeze", lambda *args: (held.append(with_memory()), freeze(*args)))
    run_ranks(Mesh({"tp": 1}), rank)
    assert held == [1] * 14  # the head; the layer itself has its new class already


def with_memory() -> int:
    gc.collect()
    return sum(type(o) is nn.Linear and not o.weight.is_meta for o in gc.get_objects())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_opens_at_any_degree(tmp_path: Path, dtype: torch.dtype) -> None:
    want = alone(dtype)(**INPUT).logits

    def save(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(made(), quantize=dtype)
        tpcore.checkpoint.save({"model": model.state_dict()}, tmp_path / "two")

    def load(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            empty = double(lambda: transformers.AutoModelForCausalLM.from_config(made().config))
        model = tpcore.parallelize(empty, quantize=dtype)
        assert model.model.layers[0].mlp.up_proj.weight.is_meta
        tpcore.checkpoint.load(tmp_path / "two", model)
        assert {m.weight.dtype for _, m in _quantized(model)} == {dtype}
        torch.testing.assert_close(model(**INPUT).logits, want, rtol=0, atol=EXACT)

    run_ranks(TWO, save)
    for degree in (1, 4):
        run_ranks(Mesh({"tp": degree}), load)
    with pytest.raises(tpcore.CheckpointError, match=r"quantized weights, '.*weight_scale' beside one: .*the scale"):
        consolidate(tmp_path / "two", tmp_path / "files")
    assert not (tmp_path / "files").exists()

    def other(ctx: tpcore.ParallelContext) -> None:
        tpcore.checkpoint.save({"model": made().state_dict()}, tmp_path / "plain")
        model = tpcore.parallelize(made(), quantize=dtype)
        with pytest.raises(tpcore.CheckpointError, match=f"has dtype torch.float64, the model {dtype}"):
            tpcore.checkpoint.load(tmp_path / "plain", model, strict=False)

    run_ranks(TWO, other)


@each_rank(tp=2)
def test_a_quantized_model_moves_and_keeps_its_weights(ctx: tpcore.ParallelContext) -> None:
    model = tpcore.parallelize(made(), quantize=FP8).bfloat16()
    for _, m in _quantized(copy.deepcopy(model)):
        assert (m.weight.dtype, m.weight_scale.dtype) == (FP8, torch.float32)
        assert sharding(m.weight_scale) is not None
    assert model(**INPUT).logits.dtype is torch.bfloat16
    with pytest.raises(ValueError, match="which have no scales: save it with tpcore"):
        model.save_pretrained("nowhere")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (17, 64), (1, 37), (0, 64)])
def test_products_in_narrow_dtypes(dtype: torch.dtype, rows: int, size: int) -> None:
    """One row of 64 entries of bfloat16 takes torch's integer kernel, whose scale is bfloat16."""
    torch.manual_seed(0)
    weight, scale = quantized.quantized(torch.randn(64, size), INT8, lambda t: t)
    x = torch.randn(1, rows, size, dtype=dtype)
    want = x.double() @ (weight.double() * scale.double()[:, None]).T
    got = quantized.linear(x, weight, None, scale)
    assert got.dtype is dtype
    # two roundings, of sums of products
    largest = max(want.abs().flatten().tolist(), default=0.0)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4 * torch.finfo(dtype).eps * largest)


def test_products_have_the_dtype_of_autocast() -> None:
    """As torch's linear has it: a block whose input is float32 makes what it makes of bfloat16."""
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))

    def rank(ctx: tpcore.ParallelContext) -> None:
        block = tpcore.parallelize(made().float(), quantize=INT8).model.layers[0].mlp
        with torch.autocast("cpu", torch.bfloat16):
            got = block(x)
        assert got.dtype is torch.bfloat16
        assert torch.equal(got, block(x.bfloat16()))

    run_ranks(TWO, rank)


def test_backward_keeps_no_wide_weight() -> None:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer = alone(INT8).model.layers[0].mlp.up_proj
        assert type(layer) is QuantizedLinear
        x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
        y = layer(x)
    y.sum().backward()
    assert {t.dtype for t in kept} == {INT8, torch.float32}
    wide = layer.weight.double() * layer.weight_scale.double()[:, None]
    torch.testing.assert_close(x.grad, wide.sum(0).expand(3, -1), rtol=0, atol=EXACT)


@pytest.mark.parametrize("how", ["before", "after"])
def test_adapters_of_a_quantized_model_train_as_in_one_process(how: str) -> None:
    peft = pytest.importorskip("peft")
    from tpcore_hf.peft import get_peft_model

    def adapted() -> Any:
        model, config = made(), peft.LoraConfig(r=4, target_modules="all-linear")
        if how == "before":
            torch.manual_seed(8)
            return tpcore.parallelize(peft.get_peft_model(model, config), quantize=INT8)
        model = tpcore.parallelize(model, quantize=INT8)
        torch.manual_seed(8)
        return get_peft_model(model, config).double()  # peft's adapters beside integers are float32

    def rank(ctx: tpcore.ParallelContext) -> tuple[list[float], dict[str, Tensor]]:
        model = adapted()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert all("lora_" in name for name in trained)
        assert all(p.is_floating_point() for p in trained.values())
        optimizer = torch.optim.SGD(trained.values(), lr=0.5)
        losses = []
        for _ in range(4):
            loss = model(**text()).loss
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        if sharding(trained["base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight"]) is not None:
            with pytest.raises(ValueError, match="not merged into a weight of torch"):
                model.merge_and_unload()
        return losses, {name: p.detach() for name, p in tpcore_hf.full_state_dict(model).items() if "lora_" in name}

    losses, tensors = run_ranks(Mesh({"tp": 1}), rank)[0]
    assert losses[-1] < losses[0]
    got, mine = run_ranks(TWO, rank)[0]
    torch.testing.assert_close(got, losses, rtol=0, atol=EXACT)
    torch.testing.assert_close(mine, tensors, rtol=0, atol=EXACT)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq"])
def test_weights_of_other_quantizers_are_refused(method: str) -> None:
    def quantized_by() -> Any:
        model = made()
        model.quantization_method = QuantizationMethod(method)
        return model

    refused(f"weights quantized by {method} cannot be sharded: load the model without", quantized_by)


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (llama, {"quantize": torch.int4}, "quantize=torch.int4: weights are quantized to torch.int8 or torch.float8"),
        (llama, {"quantize": INT8, "num_microbatches": 2}, "are not spread over stages"),
        (
            lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
            {"quantize": INT8},
            "GPT2LMHeadModel has no nn.Linear in its layers",
        ),
    ],
)
def test_what_cannot_be_quantized_is_refused_before_any_change(model: Any, options: Any, why: str) -> None:
    refused(why, model, **options)


def by_torchao() -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install torchao")
    model = llama().bfloat16()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


@pytest.mark.filterwarnings("ignore")  # torchao's own
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_torchao_has_quantized_is_sharded(tp: int) -> None:
    torch.manual_seed(0)
    whole = by_torchao()
    with torch.no_grad():
        want = whole(**INPUT).logits

    def rank(ctx: tpcore.ParallelContext) -> None:
        torch.manual_seed(0)
        model = tpcore.parallelize(by_torchao())
        down, like = model.model.layers[0].mlp.down_proj, whole.model.layers[0].mlp.down_proj.weight
        assert torch.equal(down.weight, part(like.qdata, down.weight))
        assert torch.equal(down.weight_scale, part(like.scale.flatten(), down.weight_scale))
        with torch.no_grad():
            got = model(**INPUT).logits
        torch.testing.assert_close(got, want, rtol=0, atol=0.02)  # bfloat16 sums in another order; values of 1

    run_ranks(Mesh({"tp": tp}), rank)


@pytest.mark.filterwarnings("ignore")
def test_what_torchao_has_quantized_otherwise_is_refused_and_stays() -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install torchao")
    fp8 = llama().bfloat16()
    quantization.quantize_(fp8, quantization.Float8WeightOnlyConfig())

    def rank(ctx: tpcore.ParallelContext) -> None:
        before = fp8.model.layers[0].mlp.down_proj.weight
        with pytest.raises(ValueError, match=r"q_proj: .* is not sharded; Int8WeightOnlyConfig"):
            tpcore.parallelize(fp8)
        assert fp8.model.layers[0].mlp.down_proj.weight is before
        model = by_torchao()
        with pytest.raises(ValueError, match="is quantized by torchao: leave out quantize="):
            tpcore.parallelize(model, quantize=INT8)
        with pytest.raises(ValueError, match=r"model.layers.*nothing"):
            tpcore.parallelize(model, plan={"model.layers.*.nothing": "colwise"})
        assert hasattr(model.model.layers[0].mlp.down_proj.weight, "qdata")

    run_ranks(Mesh({"tp": 1}), rank)
