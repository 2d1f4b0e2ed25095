"""An engine that serves receives the tensors of a model's files, from any mesh, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from helpers import hf
from helpers.counting import counted
from helpers.tiers import tiers
from safetensors.torch import load_file
from torch import Tensor, nn

import tpcore
from tpcore import Mesh
from tpcore.layers.sharding import sharding
from tpcore.testing import run_ranks
from tpcore_hf import WeightSource

pytestmark = [
    # peft asks transformers by a name that it has given up
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # asked for here
    pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word_embeddings=True. and:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning"),
]
T5 = transformers.T5Config(**hf.T5)
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, int], dict[str, Any]]] = {
    "padded and tied": (partial(hf.llama, tie_word_embeddings=True), {"tp": 2}, {}),
    "key heads in halves": (hf.llama, {"tp": 4}, {"sequence_parallel": True}),
    "stages": (hf.llama, {"pp": 2, "dp": 1, "tp": 2}, {"num_microbatches": 2}),
    "fused": (hf.phi3, {"dp": 2, "tp": 2}, {}),
    "experts over ranks": (hf.mixtral, {"dp": 1, "ep": 2, "tp": 2}, {"expert_parallel": True}),
    "tied in an encoder": (partial(transformers.T5ForConditionalGeneration, T5), {"tp": 2}, {}),
}


def made(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make().eval()


def received(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What ``model`` sends, which is what it said it would."""
    source = WeightSource(model, dtype=dtype)
    told, sent = source.metadata(), list(source)
    assert [(name, t.dtype, tuple(t.shape)) for name, t in sent] == told
    assert len(dict(sent)) == len(sent)
    return dict(sent)


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor], atol: float = 0) -> None:
    assert got.keys() == want.keys()
    torch.testing.assert_close(dict(got), dict(want), rtol=0, atol=atol)


@pytest.mark.parametrize("case", tiers(list(CASES)[:5], slow=list(CASES)[5:]))
def test_they_are_the_tensors_of_the_files(case: str, tmp_path: Path) -> None:
    make, mesh, options = CASES[case]
    made(make).save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(made(make), **options)
        assert_same(received(model), files)
        last = ctx.mesh.size - 1
        assert_same(dict(WeightSource(model, to=last)), files if ctx.rank == last else {})
        assert_same(received(model, torch.bfloat16), {name: t.bfloat16() for name, t in files.items()})
        with torch.no_grad():
            next(iter(model.parameters())).add_(1)  # the next time it sends the values of then
        assert any(not torch.equal(t, files[name]) for name, t in WeightSource(model))

    run_ranks(Mesh(mesh), rank)


ADAPTERS = {
    "linear": {"target_modules": "all-linear"},
    "bias": {"target_modules": ["q_proj", "down_proj"], "lora_bias": True},
    "table": {"target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["up_proj"]},
}


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("tied", [False, True])
def test_adapters_are_merged_on_the_way(name: str, tied: bool) -> None:
    """As peft merges them, and the model keeps them. A tied head has no adapter of the table's."""
    make = partial(hf.double, partial(hf.llama, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True))

    def adapted() -> Any:
        model = made(make)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **ADAPTERS[name]))
        for key, p in model.named_parameters():
            if "modules_to_save" in key:
                p.data.mul_(2)
        return model

    plain = made(make).state_dict()
    if tied:
        del plain["lm_head.weight"]
    whole, own_head = adapted(), tied and name == "table"
    if own_head:  # peft merges into the tied head too, which then has another output than the model had
        head = whole.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
    want = whole.merge_and_unload().state_dict()
    if tied and not own_head:
        del want["lm_head.weight"]

    def rank(_: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(adapted())
        before = {key: t.clone() for key, t in model.state_dict().items()}
        assert_same(received(model), want, atol=1e-14)  # of products of other sizes
        assert_same(model.state_dict(), before)
        with model.disable_adapter():
            base = received(model)
        assert_same(base, plain)
        if own_head:
            return  # peft merges into the tied head too
        model.merge_adapter()
        assert_same(received(model), want, atol=1e-14)
        with model.disable_adapter():
            assert_same(received(model), plain, atol=1e-14)  # subtracted again

    run_ranks(Mesh({"tp": 2}), rank)


def test_layers_of_ones_own() -> None:
    def rank(_: tpcore.ParallelContext) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return received(nn.Sequential(tpcore.ColumnParallelLinear(6, 8), nn.BatchNorm1d(8)), torch.float64)

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).state_dict()
    want = {name: t.double() if t.is_floating_point() else t for name, t in whole.items()}
    for got in run_ranks(Mesh({"tp": 2}), rank):
        assert_same(got, want)


def test_each_byte_goes_once_in_the_dtype_of_the_engine() -> None:
    """Each rank sends its parts of what is sharded, halves of float32 in bfloat16, and nothing of the rest."""

    def rank(_: tpcore.ParallelContext) -> int:
        model = tpcore.parallelize(made(hf.llama))
        for _ in WeightSource(model, dtype=torch.bfloat16):
            pass
        return sum(p.nbytes for p in model.parameters() if (mark := sharding(p)) and mark.axes)

    for sharded, calls in zip(*counted(Mesh({"tp": 2}), rank), strict=True):
        assert sum(call.nbytes for call in calls if call.dtype == "bfloat16") == sharded // 2


def test_one_rank_alone_is_sent_what_it_lacks_once() -> None:
    """Of dp's replicas one sends."""

    def rank(_: tpcore.ParallelContext) -> int:
        model = tpcore.parallelize(made(hf.llama))
        whole = sum(t.nbytes for _, t in WeightSource(model, to=0, dtype=torch.bfloat16))
        return whole - sum(p.nbytes for p in model.parameters()) // 2  # float32

    lacks, calls = counted(Mesh({"dp": 2, "tp": 2}), rank)
    sent = [[call.nbytes for call in of_rank if call.dtype == "bfloat16"] for of_rank in calls]
    assert [sum(n) for n in sent] == [lacks[0]] * 4  # a piece in each call, from one rank to rank 0
    with pytest.raises(ValueError, match="rank 2 is outside a mesh of 2 ranks"):
        run_ranks(Mesh({"tp": 2}), lambda _: WeightSource(nn.Linear(2, 2), to=2))
