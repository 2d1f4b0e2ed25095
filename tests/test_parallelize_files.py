"""A cut model out of files and back into files: each rank reads its part, rank 0 writes the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf
import pytest
import torch
import transformers
from hf import NO_DROPOUT, TINY, llama, text
from safetensors import safe_open
from typer.testing import CliRunner

import tpcore
from tpcore import CheckpointError, Mesh
from tpcore.cli.app import app
from tpcore.testing import run_ranks

TWO = Mesh({"tp": 2})
IMAGE = {**TINY, **NO_DROPOUT, "image_size": 32, "patch_size": 8}
MODELS = {
    "llama, one key head, tied": lambda: llama(num_key_value_heads=1, tie_word_embeddings=True),
    "gpt_neox, whose head has another name": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**TINY)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**hf.GPT2)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TINY)),
    "vit, whose layers have other names": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**IMAGE)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ),
}


def inputs(model: Any) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)}
    batch = {"input_ids": text()["input_ids"]}
    return {**batch, "decoder_input_ids": batch["input_ids"]} if model.config.is_encoder_decoder else batch


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs(model)).logits


@pytest.mark.parametrize("name", MODELS)
def test_read_by_parts_and_written_whole(name: str, tmp_path: Path) -> None:
    """By the model itself, and from a checkpoint, which needs nothing but the configuration."""
    torch.manual_seed(0)
    whole = MODELS[name]()
    whole.save_pretrained(tmp_path / "whole")
    expected, state = logits(whole), whole.state_dict()

    def rank(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            model = type(whole).from_pretrained(tmp_path / "whole")
        assert any(p.is_meta for p in model.parameters())
        known = list(model.parameters())
        tpcore.parallelize(model)
        assert all(a is b for a, b in zip(known, model.parameters(), strict=True))
        # float32: the order of sums
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
        full = tpcore.models.full_state_dict(model)
        assert full.keys() == state.keys()
        assert all(torch.equal(full[n], t) for n, t in state.items())
        model.save_pretrained(tmp_path / "again", max_shard_size="20KB")
        tpcore.checkpoint.save({"model": model.state_dict()}, str(tmp_path / "run"))

    run_ranks(TWO, rank)
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    command = ["checkpoint", "consolidate", str(tmp_path / "run"), str(tmp_path / "consolidated")]
    done = CliRunner().invoke(app, [*command, "--config", str(tmp_path / "whole" / "config.json")])
    assert done.exit_code == 0, done.output
    with (
        safe_open(tmp_path / "whole" / "model.safetensors", "pt") as file,
        safe_open(tmp_path / "consolidated" / "model.safetensors", "pt") as made,
    ):
        assert index.keys() == set(made.keys()) == set(file.keys()), "the names that transformers writes"
    for folder in ("again", "consolidated"):
        again, info = type(whole).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert torch.equal(logits(again), expected)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
    again = type(whole).from_pretrained(tmp_path / "again")
    assert again.config.to_diff_dict() == type(whole).from_pretrained(tmp_path / "whole").config.to_diff_dict()


def test_a_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    llama(num_hidden_layers=3).save_pretrained(tmp_path / "other")

    def rank(ctx: tpcore.ParallelContext) -> None:
        tpcore.checkpoint.save({"model": tpcore.parallelize(llama()).state_dict()}, str(tmp_path / "run"))

    run_ranks(TWO, rank)
    command = ["checkpoint", "consolidate", str(tmp_path / "run"), str(tmp_path / "again"), "--config"]
    (tmp_path / "empty.json").write_text("{}")
    for config, wrong in ((tmp_path / "other", "also has model.layers.2"), (tmp_path / "empty.json", "no model class")):
        done = CliRunner().invoke(app, [*command, str(config)])
        assert done.exit_code == 2
        assert wrong in done.output
    assert not (tmp_path / "again").exists()


def test_lazy_from_a_configuration_and_a_bin_file(tmp_path: Path) -> None:
    whole = llama()
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")

    def rank(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            model = transformers.AutoModelForCausalLM.from_config(whole.config)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        tpcore.parallelize(model, lazy_from=tmp_path)
        torch.testing.assert_close(logits(model), logits(whole), rtol=1e-5, atol=1e-5)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        model.train()(**text()).loss.backward()
        optimizer.step()
        for n, p in model.named_parameters():
            torch.testing.assert_close(p, before[n] - p.grad)

    run_ranks(TWO, rank)


@pytest.mark.parametrize("how", ["from_pretrained", "lazy_from"])
def test_files_of_another_model_are_refused(how: str, tmp_path: Path) -> None:
    llama(intermediate_size=128).save_pretrained(tmp_path)
    config = llama().config

    def rank(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            if how == "from_pretrained":
                with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
                    transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=config)
            model = transformers.AutoModelForCausalLM.from_config(config)
        with pytest.raises(CheckpointError, match=r"up_proj.*shape \(128, 32\), the model \(64, 32\)"):
            tpcore.parallelize(model, lazy_from=tmp_path)

    run_ranks(TWO, rank)


def test_a_full_disk_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(llama())
        with pytest.raises((CheckpointError, RuntimeError, OSError), match="file"):
            model.save_pretrained(tmp_path / "file" / "below")

    run_ranks(TWO, rank)
