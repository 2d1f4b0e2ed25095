"""Models of transformers cut over stages and tp by ``parallelize``, as the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import hf
from helpers.hf import GPT2, NO_DROPOUT, TINY
from helpers.pipelines import assert_same_gradients, part_of
from helpers.worlds import each_rank
from safetensors.torch import load_file, save_file

import tpcore
from tpcore import CheckpointError, Mesh
from tpcore.layers.sharding import sharding
from tpcore.testing import run_ranks

FOUR = {**TINY, "num_hidden_layers": 4}
ROUNDS = {"rtol": 1e-6, "atol": 1e-7}  # norms of transformers compute in float32

MODELS = {
    "llama": lambda: hf.llama(num_hidden_layers=4),
    "llama, tied": lambda: hf.llama(num_hidden_layers=4, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, "n_layer": 4})),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**{**FOUR, **NO_DROPOUT})),
}


def text() -> dict[str, torch.Tensor]:
    """As many labels in each microbatch."""
    batch = hf.text(length=6)
    return {name: torch.cat([t[:2], t[:2]]) for name, t in batch.items()}


@pytest.mark.parametrize(
    ("name", "pp", "tp", "sequence_parallel"),
    [
        ("llama", 2, 2, False),
        ("llama", 2, 2, True),
        ("llama, tied", 4, 1, False),
        ("llama, tied", 1, 2, False),
        ("gpt2", 2, 2, True),
        ("bert", 2, 2, False),
    ],
)
def test_equals_the_whole_model(name: str, pp: int, tp: int, sequence_parallel: bool) -> None:
    whole = hf.double(MODELS[name])
    want = whole(**text()).loss
    want.backward()

    def rank(ctx: tpcore.ParallelContext) -> set[str]:
        for engine in ("layers", "lockstep"):
            model: Any = hf.double(MODELS[name])
            tpcore.parallelize(model, num_microbatches=2, sequence_parallel=sequence_parallel)
            if engine == "lockstep":
                loss = tpcore.PipelineModel(model, 2).run_train(**text())
            else:
                loss = model(**text()).loss
                loss.backward()
            torch.testing.assert_close(loss.detach(), want, **ROUNDS)
            assert_same_gradients(model, whole, ctx, **ROUNDS)
        return {key for key, _ in model.named_parameters()}

    names = run_ranks(Mesh({"pp": pp, "dp": 1, "tp": tp}), rank)
    assert set().union(*names) == {key for key, _ in whole.named_parameters()}


def test_stages_need_a_number_of_microbatches() -> None:
    mesh = {"pp": 2, "dp": 1, "tp": 1}
    hf.refused(r"parallelize on pp=2 stages needs num_microbatches=.* 8, they", hf.llama, mesh)


@pytest.mark.parametrize("name", ["output_router_logits", "output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("pp", [1, 2])
@each_rank(pp="pp", dp=1, tp=1)
def test_what_is_collected_in_layers_is_refused(ctx: tpcore.ParallelContext, name: str, pp: int) -> None:
    """It would be that of one stage and one microbatch, and so would a loss of routers."""
    batch = {"input_ids": hf.text()["input_ids"]}
    for options in ({}, {name: True}):
        model = tpcore.parallelize(hf.mixtral(**options, attn_implementation="eager"), num_microbatches=3)
        given = {} if options else {name: True}
        engine = tpcore.PipelineModel(model, 3)
        for call in (model, model.model, engine.run_train):
            with pytest.raises(ValueError, match=f"{name}=True with num_microbatches: it is collected in the lay"):
                call(**batch, **given)


@pytest.mark.parametrize("name", ["input_ids", "labels"])
@each_rank(pp=2, dp=1, tp=1)
def test_stages_with_other_batches_are_refused(ctx: tpcore.ParallelContext, name: str) -> None:
    """They share the vocabulary, which would mix them up."""
    model: Any = tpcore.parallelize(hf.llama(), num_microbatches=3)
    batch = hf.text()
    batch[name] = batch[name].roll(ctx.coord("pp"), 1)
    with pytest.raises(ValueError, match=f"stages 0 and 1 .* differ in {name}: .*takes ctx.index"):
        model(**batch)


def mixtral() -> Any:
    more = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**TINY, **more}))


@pytest.mark.parametrize("model", [MODELS["llama, tied"], mixtral])
def test_stages_save_one_model(model: Callable[[], Any], tmp_path: Path) -> None:
    """In the files of the whole: of experts, for example, each by itself."""

    def made() -> Any:
        torch.manual_seed(0)
        return model()

    full = made().state_dict()
    made().save_pretrained(tmp_path / "whole")
    want = load_file(tmp_path / "whole" / "model.safetensors")

    def rank(ctx: tpcore.ParallelContext) -> None:
        model: Any = tpcore.parallelize(made(), num_microbatches=2)
        for _ in range(2):  # over files that are there
            model.save_pretrained(tmp_path, max_shard_size="20KB")

    run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 2}), rank)
    files = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    assert len(files) > 1
    assert {name for file in files for name in file} == want.keys()
    again, info = type(made()).from_pretrained(tmp_path, output_loading_info=True)
    assert all(torch.equal(t, full[name]) for name, t in again.state_dict().items())
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert {f.name for f in tmp_path.iterdir() if f.name.startswith(".")} == set()


def test_a_save_of_stages_that_fails_leaves_the_model_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise tpcore.CheckpointError("no space left")

    def rank(ctx: tpcore.ParallelContext) -> None:
        model: Any = tpcore.parallelize(hf.llama(), num_microbatches=2)
        model.save_pretrained(tmp_path)
        monkeypatch.setattr("tpcore_hf.load.gathered.write_weights", full)
        with pytest.raises(tpcore.CheckpointError, match="no space left"):
            model.save_pretrained(tmp_path)

    run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 1}), rank)
    assert {f.name for f in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


def test_each_stage_reads_its_own_of_the_files(tmp_path: Path) -> None:
    """Lazily, and into a model that is there; what is on a stage alone says so afterwards."""
    torch.manual_seed(0)
    whole = hf.llama(num_hidden_layers=4)
    whole.save_pretrained(tmp_path)
    full, want = whole.state_dict(), whole(**hf.text()).loss.detach()

    def rank(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            lazily: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        tpcore.parallelize(lazily, num_microbatches=1)
        there: Any = tpcore.parallelize(hf.llama(num_hidden_layers=4), num_microbatches=1)
        tpcore.checkpoint.load(tmp_path, there, sharded=False)
        for model in (lazily, there):
            for name, p in model.named_parameters():
                assert torch.equal(p, part_of(full[name], p, ctx)), name
                on_one = name.startswith("model.layers.")
                mark = sharding(p)
                assert on_one == (mark is not None and mark.layout.slot is not None), name
            # as the whole model's in float32, in which the order of sums differs
            torch.testing.assert_close(model(**hf.text()).loss.detach(), want, rtol=1e-5, atol=1e-5)

    run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 2}), rank)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_name_that_no_stage_has_is_refused_at_any_number_of_stages(tmp_path: Path, pp: int, sharded: bool) -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(hf.llama(num_hidden_layers=2), num_microbatches=1)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"does not fit the model:\n  'of.nobody': the checkpoint has"):
            tpcore.checkpoint.load(where, model, sharded=sharded)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    whole, where = hf.llama(num_hidden_layers=2), tmp_path / "whole.safetensors"
    state = {**whole.state_dict(), "of.nobody": torch.ones(2)}
    save_file(state, where)
    if sharded:
        where = tmp_path / "c"
        run_ranks(Mesh({"pp": 1, "dp": 1, "tp": 1}), lambda ctx: tpcore.checkpoint.save({"model": state}, where))
    run_ranks(Mesh({"pp": pp, "dp": 1, "tp": 1}), rank)


def one_layer_of_experts() -> Any:
    """Layers of which the last has experts."""
    sizes = {**TINY, "num_hidden_layers": 3, "head_dim": 8, "num_key_value_heads": 4, "mlp_only_layers": [0, 1]}
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**sizes, **experts, experts_implementation="eager")
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "per_stage", "want"),
    [
        (lambda: hf.llama(num_hidden_layers=5), "balanced", [3, 2]),
        (lambda: hf.llama(num_hidden_layers=5), [1, 4], [1, 4]),
        (one_layer_of_experts, "balanced", [2, 1]),
    ],
)
def test_stages_of_different_numbers_of_layers(make: Any, per_stage: Any, want: list[int], tmp_path: Path) -> None:
    whole = hf.double(make)
    loss = whole(**text()).loss
    loss.backward()

    def rank(ctx: tpcore.ParallelContext) -> int:
        model: Any = hf.double(make)
        tpcore.parallelize(model, num_microbatches=2, layers_per_stage=per_stage)
        got = model(**text()).loss
        got.backward()
        torch.testing.assert_close(got, loss, **ROUNDS)
        assert_same_gradients(model, whole, ctx, **ROUNDS)
        assert model.num_parameters() == whole.num_parameters()
        model.save_pretrained(tmp_path)
        return len(list(model.model.layers.children()))

    assert run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 2}), rank)[::2] == want
    again = type(whole).from_pretrained(tmp_path, dtype=torch.float64)
    for (name, p), q in zip(again.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q), name


# -- the layers alone: the model's own forward runs the pipeline
def padded() -> dict[str, torch.Tensor]:
    """With padding: masks differ by microbatch, and the numbers of labels do not."""
    ids = torch.randint(3, 99, (6, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(6, 8, dtype=torch.int64)
    mask[1, :3], mask[4, 5:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def uncached(name: str) -> Any:
    model: Any = hf.double(MODELS[name])
    model.config.use_cache = False
    return model


@pytest.mark.parametrize("engine", ["layers", "lockstep"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_model_that_no_plan_cut(name: str, engine: str) -> None:
    dense = uncached(name)
    want = dense(**padded()).loss
    want.backward()
    grads = {n: p.grad for n, p in dense.named_parameters()}

    def rank(ctx: tpcore.ParallelContext) -> set[str]:
        model = uncached(name)
        pipe = tpcore.PipelineModel(model, 3)
        if engine == "lockstep":
            loss = pipe.run_train(**padded())
        else:
            out = model(**padded())
            loss = out.loss
            loss.backward()
            assert out.logits.shape == (6, 8, 99)
        torch.testing.assert_close(loss.detach(), want.detach(), **ROUNDS)
        torch.testing.assert_close(pipe.run_eval(**padded()), want.detach(), **ROUNDS)
        for n, p in model.named_parameters():
            torch.testing.assert_close(p.grad, grads[n], **ROUNDS)
        return {n for n, _ in model.named_parameters()}

    names = run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 1}), rank)
    assert set().union(*names) == set(grads)


def test_the_loss_of_all_tokens_where_microbatches_have_different_numbers() -> None:
    """The model divides by the number that it is given; the microbatches' losses are added."""
    labels = padded()["input_ids"].clone()
    labels[0, :] = labels[3, 2:] = -100
    dense = uncached("llama")
    count = (labels[:, 1:] != -100).sum()
    want = dense(input_ids=padded()["input_ids"], labels=labels).loss
    given = {"input_ids": padded()["input_ids"], "labels": labels, "num_items_in_batch": count}

    def rank(ctx: tpcore.ParallelContext) -> None:
        pipe = tpcore.PipelineModel(uncached("llama"), 3, loss="sum")
        torch.testing.assert_close(pipe.run_train(**given), want.detach(), **ROUNDS)

    run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 1}), rank)


@each_rank(pp=2, dp=1, tp=1)
def test_a_cache_is_refused_with_the_remedy(ctx: tpcore.ParallelContext) -> None:
    model = uncached("llama")
    tpcore.PipelineModel(model, 2)
    with pytest.raises(ValueError, match=r"get (cache|past_key_values), a DynamicCache: .*use_cache=False"):
        model(**padded(), use_cache=True)
