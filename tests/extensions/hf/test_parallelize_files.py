"""A cut model out of files and back: each rank reads its part of what transformers reads, rank 0 writes the whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import families, hf
from helpers.hf import GPT2, NO_DROPOUT, T5, TINY, llama, text
from helpers.worlds import each_rank
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import tpcore
import tpcore_hf
from tpcore import CheckpointError, Mesh
from tpcore.testing import run_ranks

TWO = Mesh({"tp": 2})
IMAGE = {**TINY, **NO_DROPOUT, "image_size": 32, "patch_size": 8}


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


def bert(kind: str = "BertForMaskedLM") -> Any:
    model = getattr(transformers, kind)(transformers.BertConfig(**TINY, **NO_DROPOUT))
    if kind == "BertForMaskedLM":
        torch.nn.init.normal_(model.cls.predictions.bias)  # zero, it would be right wherever it is read
    return model


T = transformers
MODELS: dict[str, Callable[[], Any]] = {
    "llama, one key head, tied": lambda: llama(num_key_value_heads=1, tie_word_embeddings=True),
    "gpt_neox, whose head has another name": lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(**TINY)),
    "gpt2": gpt2,
    "bert": bert,
    "vit, whose layers have other names": lambda: T.ViTForImageClassification(T.ViTConfig(**IMAGE)),
    "t5": lambda: T.T5ForConditionalGeneration(T.T5Config(**T5)),
}


def inputs(model: Any) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)}
    batch = {"input_ids": text()["input_ids"]}
    return {**batch, "decoder_input_ids": batch["input_ids"]} if model.config.is_encoder_decoder else batch


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs(model))[0]


@pytest.mark.parametrize("name", MODELS)
def test_read_by_parts_and_written_whole(name: str, tmp_path: Path) -> None:
    """By the model itself, and from a checkpoint, which needs nothing but the configuration."""
    torch.manual_seed(0)
    whole = MODELS[name]()
    whole.save_pretrained(tmp_path / "whole")
    assert_read_alike(type(whole), tmp_path / "whole")

    def rank(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            model = type(whole).from_pretrained(tmp_path / "whole")
        tpcore.parallelize(model)
        model.save_pretrained(tmp_path / "again", max_shard_size="20KB")
        tpcore.checkpoint.save({"model": model.state_dict()}, str(tmp_path / "run"))

    run_ranks(TWO, rank)
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    hf.consolidate(tmp_path / "run", tmp_path / "consolidated", tmp_path / "whole" / "config.json")
    with (
        safe_open(tmp_path / "whole" / "model.safetensors", "pt") as file,
        safe_open(tmp_path / "consolidated" / "model.safetensors", "pt") as made,
    ):
        assert index.keys() == set(made.keys()) == set(file.keys()), "the names that transformers writes"
    for folder in ("again", "consolidated"):
        again, info = type(whole).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert torch.equal(outputs(again), outputs(whole))
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
    again = type(whole).from_pretrained(tmp_path / "again")
    assert again.config.to_diff_dict() == type(whole).from_pretrained(tmp_path / "whole").config.to_diff_dict()


def test_a_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    llama(num_hidden_layers=3).save_pretrained(tmp_path / "other")

    def rank(ctx: tpcore.ParallelContext) -> None:
        tpcore.checkpoint.save({"model": tpcore.parallelize(llama()).state_dict()}, str(tmp_path / "run"))

    run_ranks(TWO, rank)
    (tmp_path / "empty.json").write_text("{}")
    for config, wrong in ((tmp_path / "other", "also has model.layers.2"), (tmp_path / "empty.json", "no model class")):
        assert wrong in hf.consolidate(tmp_path / "run", tmp_path / "again", config, exit_code=2)
    assert not (tmp_path / "again").exists()


def test_lazy_from_a_configuration_and_a_bin_file(tmp_path: Path) -> None:
    whole = llama()
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")

    def rank(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            model = transformers.AutoModelForCausalLM.from_config(whole.config)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        tpcore.parallelize(model, lazy_from=tmp_path)
        torch.testing.assert_close(outputs(model), outputs(whole), rtol=1e-5, atol=1e-5)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        model.train()(**text()).loss.backward()
        optimizer.step()
        for n, p in model.named_parameters():
            torch.testing.assert_close(p, before[n] - p.grad)

    run_ranks(TWO, rank)


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    llama(intermediate_size=128).save_pretrained(tmp_path)
    config = llama().config

    def rank(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            model = transformers.AutoModelForCausalLM.from_config(config)
        with pytest.raises(CheckpointError, match=r"up_proj.*shape \(128, 32\), the model \(64, 32\)"):
            tpcore.parallelize(model, lazy_from=tmp_path)

    run_ranks(TWO, rank)


@each_rank(tp=2)
def test_a_full_disk_is_an_error_on_every_rank(ctx: tpcore.ParallelContext, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model: Any = tpcore.parallelize(llama())
    with pytest.raises((CheckpointError, RuntimeError, OSError), match="file"):
        model.save_pretrained(tmp_path / "file" / "below")


State = dict[str, Tensor]


def assert_read_alike(kind: Any, path: Any, degrees: tuple[int, ...] = (2,), plan: Any = None, **options: Any) -> None:
    """A model read by parts has the tensors, the report and the outputs of one that transformers reads."""
    torch.manual_seed(1)
    whole, report = kind.from_pretrained(path, output_loading_info=True, **options)
    want, expected = whole.state_dict(), outputs(whole)

    def rank(ctx: tpcore.ParallelContext) -> None:
        torch.manual_seed(1)
        with tpcore.lazy():
            model, said = kind.from_pretrained(path, output_loading_info=True, **options)
        assert said == report
        unread = sum(p.numel() for p in model.parameters() if p.is_meta)
        assert unread >= 0.9 * model.num_parameters(), "only what no file has is made before the cut"
        known = list(model.parameters())
        tpcore.parallelize(model, plan=plan)
        assert all(a is b for a, b in zip(known, model.parameters(), strict=True))
        state = tpcore_hf.full_state_dict(model)
        assert {n: t.dtype for n, t in state.items()} == {n: t.dtype for n, t in want.items()}
        assert all(torch.equal(t, want[n]) for n, t in state.items())
        assert dict(whole.named_buffers()).keys() == dict(model.named_buffers()).keys()
        torch.testing.assert_close(outputs(model), expected, rtol=1e-5, atol=1e-5)  # the order of sums

    for degree in degrees:
        run_ranks(Mesh({"tp": degree}), rank)


def of_the_hub(state: State) -> State:
    """GPT-2 as the hub has it: no prefix, and the masks of its attention as buffers."""
    names = {name.removeprefix("transformer."): t for name, t in state.items() if name != "lm_head.weight"}
    mask = torch.ones(64, 64).tril().view(1, 1, 64, 64)
    return names | {f"h.{i}.attn.bias": mask for i in range(2)} | {"h.0.attn.masked_bias": torch.tensor(-1e4)}


def with_position_ids(state: State) -> State:
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): t for n, t in state.items()}
    return old | {"bert.embeddings.position_ids": torch.arange(64)[None]}


def with_frequencies(state: State) -> State:
    return state | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}


def untied_names(state: State) -> State:
    return state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}


def untied_values(state: State) -> State:
    return state | {"lm_head.weight": state["model.embed_tokens.weight"] + 1}


TIED = partial(llama, num_key_value_heads=4, tie_word_embeddings=True)
LLAMA = partial(llama, num_key_value_heads=4)
FILES: dict[str, tuple[Callable[[], Any], Callable[[State], State], str]] = {
    "gpt2 of the hub": (gpt2, of_the_hub, "GPT2LMHeadModel"),
    "gpt2 of the hub, base": (gpt2, of_the_hub, "GPT2Model"),
    "bert with position_ids": (bert, with_position_ids, "BertForMaskedLM"),
    "bert, base": (bert, with_position_ids, "BertModel"),
    "bert, new head": (bert, with_position_ids, "BertForSequenceClassification"),
    "llama with inv_freq": (LLAMA, with_frequencies, "LlamaForCausalLM"),
    "llama, base": (LLAMA, with_frequencies, "LlamaModel"),
    "llama, new head": (LLAMA, dict, "LlamaForSequenceClassification"),
    "tied, both in the file": (TIED, untied_names, "LlamaForCausalLM"),
    "said to be tied, different": (TIED, untied_values, "LlamaForCausalLM"),
}


def write(path: Path, name: str, file: str = "model.safetensors") -> Any:
    """The files of the model of that name. Returns the class to read them with."""
    make, change, kind = FILES[name]
    torch.manual_seed(0)
    model = make()
    model.config.save_pretrained(path)
    state = {n: t.clone() for n, t in change(model.state_dict()).items()}
    if file.endswith(".bin"):
        torch.save(state, path / file)
    else:
        save_file(state, path / file, {"format": "pt"})
    return getattr(transformers, kind)


@pytest.mark.parametrize("name", FILES)
def test_files_are_read_as_by_transformers(name: str, tmp_path: Path) -> None:
    kind = write(tmp_path, name)
    options = {"num_labels": 3, "degrees": (4,)} if "new" in name else {}
    assert_read_alike(kind, tmp_path, pad_token_id=0, **options)


def test_options_of_from_pretrained(tmp_path: Path) -> None:
    kind = write(tmp_path / "sub", "gpt2 of the hub", "pytorch_model.bin")
    old = {"from_tf": False, "low_cpu_mem_usage": True, "device_map": None, "revision": "main"}
    assert_read_alike(kind, tmp_path, subfolder="sub", torch_dtype=torch.float64, **old)


def test_a_variant_in_several_files(tmp_path: Path) -> None:
    write(tmp_path, "bert with position_ids", "all.bin")
    state = torch.load(tmp_path / "all.bin")
    files = {n: f"pytorch_model.old-0000{1 + i % 2}-of-00002.bin" for i, n in enumerate(state)}
    for file in set(files.values()):
        torch.save({n: t for n, t in state.items() if files[n] == file}, tmp_path / file)
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "pytorch_model.bin.index.old.json").write_text(json.dumps(index))
    assert_read_alike(transformers.BertForMaskedLM, tmp_path, variant="old")


def test_sizes_that_differ_are_an_error_or_initialised(tmp_path: Path) -> None:
    kind = transformers.BertForSequenceClassification
    bert(kind.__name__).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"), tpcore.lazy():
        kind.from_pretrained(tmp_path, num_labels=5)
    assert_read_alike(kind, tmp_path, num_labels=5, ignore_mismatched_sizes=True)


@pytest.mark.parametrize(
    ("family", "plan"), [("hrm_text", {}), ("mixtral", {"model.layers.*.mlp.experts": "replicate"})]
)
def test_tensors_that_are_split_or_merged(family: str, plan: dict[str, Any], tmp_path: Path) -> None:
    """One tensor of gate and up for two layers, a tensor for each expert for one of all."""
    kind: Any = families.class_of(family)
    model = kind(families.config_of(family))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert not any(name in stored for name in model.state_dict() if "mlp.experts" in name or "gate_" in name)
    assert_read_alike(kind, tmp_path, (1, 2), plan=plan)


def test_options_that_distribute_are_refused(tmp_path: Path) -> None:
    kind = write(tmp_path, "bert, base")
    with pytest.raises(ValueError, match="leave out device_map"), tpcore.lazy():
        kind.from_pretrained(tmp_path, device_map="cpu")


def test_a_copy_of_a_lazy_model_is_read_too(tmp_path: Path) -> None:
    kind = write(tmp_path, "gpt2 of the hub")
    whole = kind.from_pretrained(tmp_path)

    def rank(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            model = kind.from_pretrained(tmp_path)
        for one in (copy.deepcopy(model), model):
            torch.testing.assert_close(outputs(tpcore.parallelize(one)), outputs(whole), rtol=1e-5, atol=1e-5)

    run_ranks(Mesh({"tp": 2}), rank)
