"""What the ways send and keep: by their formulas, as recorded, and the choice that follows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers.worlds import Peak, each_rank
from torch import Tensor
from typer.testing import CliRunner

import tpcore
from tpcore import Mesh
from tpcore.cli.app import app
from tpcore.layers import context_parallel, ring
from tpcore.layers.context_parallel import ContextParallelAttention, Way
from tpcore.testing import run_ranks
from tpcore_hf.sequence.sizes import AttentionSizes

HEADS, HEAD_DIM, LAYERS = 8, 4, 2
WAYS = get_args(Way)


def sizes(keys: int, cp: int, itemsize: int = 4, hidden: int = HEADS * HEAD_DIM) -> AttentionSizes:
    return AttentionSizes(HEADS, keys, HEAD_DIM, hidden, itemsize, cp, 1)


def config(folder: Path, keys: int, **more: Any) -> str:
    made = {"hidden_size": HEADS * HEAD_DIM, "intermediate_size": 64, "num_hidden_layers": LAYERS, "vocab_size": 16}
    made |= {"num_attention_heads": HEADS, "num_key_value_heads": keys, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps({**made, "architectures": ["LlamaForCausalLM"], **more}))
    return str(folder)


@pytest.mark.parametrize("keys", [8, 2])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_those_of_a_recorded_step(way: Way, cp: int, keys: int, tmp_path: Path) -> None:
    where = config(tmp_path, keys)
    for dtype in (torch.float32, torch.bfloat16):
        found = tpcore.explain(
            where, cp=cp, seq_len=64, plan="auto", context_parallel=way, ranks=[0], dtype=dtype, max_norm=None
        )
        calls = [c for c in found.program(0).collectives if c.axes == ("cp",) and len(c.shape) == 4]
        assert sum(c.sent for c in calls) == LAYERS * sizes(keys, cp, dtype.itemsize).sent(way, 64)


@pytest.mark.parametrize("way", ["gather", "ulysses"])
def test_keys_of_latent_attention_are_wider_than_its_values(way: Way, tmp_path: Path) -> None:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    architecture = {"model_type": "minicpm3", "architectures": ["MiniCPM3ForCausalLM"]}
    where = config(tmp_path, HEADS, **latent, **architecture)
    step = tpcore.explain(where, cp=2, seq_len=4096, plan="auto", context_parallel=way, ranks=[0], max_norm=None)
    calls = [c for c in step.program(0).collectives if c.axes == ("cp",) and len(c.shape) == 4]
    width = (8 + 4 + 8) // 2
    of = AttentionSizes(HEADS, HEADS, width, HEADS * HEAD_DIM, 4, 2, 1)
    assert sum(c.sent for c in calls) == LAYERS * of.sent(way, 4096)
    assert f"sends {of.sent(way, 4096) / 2**20:,.1f} MiB" in str(step.to_json())


def kept(layer: ContextParallelAttention, length: int, keys: int, masked: bool = False) -> int:
    """Bytes that autograd keeps of one attention, each memory once."""
    found: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    made = [torch.randn(1, heads, length, HEAD_DIM) for heads in (HEADS, keys, keys)]
    mine = [layer.order.cut(t, 2).requires_grad_() for t in made]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = layer(*mine, segments=torch.zeros(1, length, dtype=torch.int64) if masked else None)
    assert out.shape == mine[0].shape
    return sum(found.values())


@pytest.mark.parametrize("cp", [1, 2, 4])
@each_rank(dp=1, cp="cp")
def test_what_backward_keeps(ctx: tpcore.ParallelContext, cp: int) -> None:
    """The formulas, beside which are the logarithms of sums, one of each query and head; and what the ring keeps
    grows with a rank's own tokens."""
    for way in WAYS:
        layer = ContextParallelAttention(way)
        for length, masked in itertools.product((256, 512), (False, True)):
            least = sizes(2, cp).kept(way, length, masked)
            more = 4 * HEADS * length // cp + 8 * masked * length + 1024
            assert 0 <= kept(layer, length, 2, masked) - least <= more, (way, length, masked)
    ring = ContextParallelAttention("ring")
    assert kept(ring, 512, 2) == 2 * kept(ring, 256, 2) == kept(ring, 256 * cp, 2) * 2 // cp


def peak(way: Way, cp: int, length: int) -> int:
    """Of forward and backward on the rank that needs most."""

    def rank(ctx: tpcore.ParallelContext) -> int:
        layer = ContextParallelAttention(way)
        made = [torch.randn(1, heads, length // cp, HEAD_DIM, requires_grad=True) for heads in (HEADS, 2, 2)]
        with Peak() as found:
            layer(*made).sum().backward()
        return found.most

    return max(run_ranks(Mesh({"dp": 1, "cp": cp}), rank))


def test_the_rings_peak_is_of_a_ranks_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what backward keeps there are the scores of a fixed number of queries with one block of keys."""
    monkeypatch.setattr(ring, "ROWS", 16)
    short = peak("ring", 2, 256)
    assert peak("ring", 2, 512) < 2.1 * short  # twice the tokens; masks and places add little
    assert peak("ring", 4, 512) < 1.2 * short  # as many tokens of a rank, in more steps
    assert peak("gather", 2, 512) > 3 * peak("gather", 2, 256)  # a mask of queries by keys: 4 times in the limit


def test_a_large_mask_is_no_part_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_parallel, "LARGEST_MASK", 16 * 1024)
    assert peak("gather", 2, 1024) < 2.2 * peak("gather", 2, 512)  # twice the tokens; a run has fewer queries


def test_the_choice_is_of_fewest_bytes_that_fit() -> None:
    large = {"hidden": 4096}
    assert sizes(8, 4, **large).choose(1024)[0] == "ulysses"  # as many key heads as heads
    assert sizes(2, 4, **large).choose(1024)[0] == "gather"
    assert sizes(8, 3, **large).choose(1023)[0] == "gather"  # 3 does not divide the heads
    for keys in (8, 2):
        way, why = sizes(keys, 4, **large).choose(2**20)
        assert way == "ring"
        sent, mask = sizes(keys, 4).sent("ring", 2**20), sizes(keys, 4).kept("gather", 2**20)
        assert f"ring {sent / 2**20:,.1f} MiB" in why
        assert f"and {mask / 2**20:,.1f} MiB, ulysses" in why


def explained(where: str, options: str) -> str:
    done = CliRunner().invoke(app, ["explain", where, "--ranks", "0", *options.split()])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("way", WAYS)
def test_explain_deals_the_tokens_of_a_configuration_and_tells_the_costs(way: Way, tmp_path: Path) -> None:
    cp = 4
    text = explained(config(tmp_path, 2), f"--cp {cp} --seq-len 4096 --context-parallel {way} --dtype bfloat16")
    of = sizes(2, cp, itemsize=2)
    kept, rest = of.kept(way, 4096, masked=False), of.rest(4096)
    shown = [f"{n / 2**20:,.1f} MiB" for n in (of.sent(way, 4096), kept, rest, LAYERS * (kept + rest))]
    assert (
        f"context_parallel: {way!r} for 4096 tokens over cp=4: for each sequence an attention sends {shown[0]}" in text
    )
    assert f"keeps {shown[1]} for backward, the rest of its layer keeps about {shown[2]}; 2 layers" in text
    assert f"keep about {shown[3]}" in text
    for other in {*WAYS} - {way}:
        sent, would = of.sent(other, 4096), of.kept(other, 4096, masked=False)
        assert f"{other!r} would send {sent / 2**20:,.1f} MiB and keep {would / 2**20:,.1f} MiB" in text
    assert f"its logits are {16 * 4096 // cp * 2 / 2**20:,.1f} MiB" in text
    assert "all over cp of 4" in text


@pytest.mark.parametrize("way", WAYS)
def test_explain_finds_no_fault_in_attention_over_parts_of_heads_and_tokens(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_parallel, "LARGEST_MASK", 256)  # masks in runs, on tensors without values
    text = explained(config(tmp_path, 2), f"--tp 2 --cp 2 --seq-len 64 --context-parallel {way}")
    assert "sees only" not in text
    assert "all over cp of 2" in text


def test_explain_takes_all_runs_of_a_large_mask_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 131072 tokens there are thousands in each layer, and explaining one step would take an hour."""
    calls: list[Any] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(*arguments: Any, **options: Any) -> Tensor:
        calls.append(arguments)
        return attend(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    monkeypatch.setattr(context_parallel, "LARGEST_MASK", 256)  # a run for each query
    tpcore.explain(config(tmp_path, 2), cp=2, seq_len=64, ranks=[0])
    assert len(calls) == 2 * LAYERS  # in forward, and again in backward


def test_explain_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for length, way in ((64, "gather"), (4096, "ring")):
        explained(config(tmp_path, 2), f"--seq-len {length} --cp 4 --context-parallel auto")
        assert f"context_parallel='auto' is '{way}' for {length} tokens over cp=4: an attention sends" in caplog.text
