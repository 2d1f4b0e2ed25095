"""``tpcore verify --model``: a tiny copy of a model's own configuration, sharded, beside the whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import programs as forked
from helpers.tiers import tiers
from typer.testing import CliRunner

import tpcore
from tpcore import Mesh
from tpcore.cli.app import app
from tpcore.testing import run_ranks
from tpcore_explain.verify.model import ModelVerdict, compared, tiny_model
from tpcore_hf.experts.dispatch import SendTokens, put
from tpcore_hf.experts.layers import ShardedExperts

GEMMA = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),  # three layers without experts come first
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA),
    "gpt2": ("GPT2LMHeadModel", {}),  # no size of heads of its own
    "t5": ("T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
}


def folder_of(kind: str, path: Path, **sizes: Any) -> str:
    """A folder as of a model of full size, without weights."""
    architecture, options = MODELS[kind]
    config = transformers.AutoConfig.for_model(kind, **{**options, **sizes})
    config.architectures = [architecture]
    config.save_pretrained(path / kind)
    return str(path / kind)


def verdict(folder: str, tp: int = 2, **options: Any) -> ModelVerdict:
    return run_ranks(Mesh({"tp": tp}), lambda ctx: compared(ctx, folder, options))[0]


@pytest.mark.parametrize("kind", tiers(["mixtral", "gpt2"], slow=MODELS))
def test_a_right_model_is_told_so(kind: str, tmp_path: Path) -> None:
    found = verdict(folder_of(kind, tmp_path))
    assert found.wrong is None
    assert "gradients are the whole model's" in found.lines[1]


@pytest.mark.parametrize("options", [{"expert_parallel": True}, {"sequence_parallel": True}], ids=["experts", "tokens"])
def test_options_are_those_of_parallelize(options: dict[str, Any], tmp_path: Path) -> None:
    assert verdict(folder_of("mixtral", tmp_path), **options).wrong is None


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("options", [{}, {"expert_parallel": True, "dispatch": "all_to_all"}], ids=["", "all_to_all"])
def test_experts_that_ranks_with_other_examples_share(options: dict[str, Any], tp: int, tmp_path: Path) -> None:
    folder, mesh = folder_of("mixtral", tmp_path, output_router_logits=True), Mesh({"dp": 1, "ep": 2, "tp": tp})
    if tp == 1:
        options = {**options, "expert_parallel": False}
    found = run_ranks(mesh, lambda ctx: compared(ctx, folder, options))[1]
    assert (found.wrong, found.refused) == (None, None)
    assert f"of which a rank of tp={tp}, ep=2 holds" in found.lines[0]


def test_tokens_that_come_to_other_ranks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mesh = folder_of("mixtral", tmp_path), Mesh({"dp": 1, "ep": 2, "tp": 1})
    monkeypatch.setattr(SendTokens, "leave", lambda self, out: put(out, self.source, self.tokens))  # not sent back
    found = run_ranks(mesh, lambda ctx: compared(ctx, folder, {"dispatch": "all_to_all"}))[0]
    assert found.wrong is not None
    assert "differs" in found.wrong


def test_what_decides_the_sharding_stays(tmp_path: Path) -> None:
    made = tiny_model(folder_of("deepseek_v3", tmp_path), 2)
    config = made.config
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_group) == (256, 8, 8)
    assert (config.num_attention_heads, config.qk_rope_head_dim, config.v_head_dim) == (128, 64, 128)
    assert (config.num_hidden_layers, config.first_k_dense_replace) == (4, 3)
    assert sum(p.numel() for p in made.parameters()) < 20_000_000
    assert made.dtype == torch.float64


def test_a_wrong_gradient_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardedExperts, "_entered", lambda self, value, _: value)  # gradients of inputs are not summed
    found = verdict(folder_of("mixtral", tmp_path))
    assert found.wrong is not None
    assert found.wrong.startswith("the gradient of model.layers.*.mlp.gate.weight")


def test_a_degree_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = folder_of("mixtral", tmp_path)

    def rank(ctx: tpcore.ParallelContext) -> None:
        with pytest.raises(ValueError, match="Degrees that fit: 1, 2, 4, 8"):
            compared(ctx, folder, {})

    run_ranks(Mesh({"tp": 3}), rank)


def test_a_model_of_images_is_refused(tmp_path: Path) -> None:
    config = transformers.ViTConfig()
    config.architectures = ["ViTModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="ViTModel takes pixel_values, and --model compares models of text"):
        tiny_model(tmp_path, 2)


def test_a_folder_without_a_model_starts_nothing(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["verify", "--model", str(tmp_path), "--backend", "cpu_gloo"])
    assert (found.exit_code, found.output) == (
        2,
        f"tpcore verify: --model {tmp_path} has no config.json: name a folder of a transformers model\n",
    )


@pytest.mark.slow
@pytest.mark.processes
def test_the_command(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TPCORE_CHECK")}
    tail = ["--model", folder_of("mixtral", tmp_path), "--backend", "cpu_gloo", "--expert-parallel"]
    done = forked.run(["tpcore", "verify", *tail], tmp_path, env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("a tiny copy of MixtralForCausalLM (mixtral): ")
    done = forked.run(["tpcore", "verify", *tail, "--ep", "2", "--tp", "1", "--dispatch", "auto"], tmp_path, env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of tp=1, ep=2 holds" in done.stdout
    done = forked.run(["tpcore", "verify", *tail, "--tp", "3"], tmp_path, env)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Degrees that fit: 1, 2, 4, 8" in done.stderr
