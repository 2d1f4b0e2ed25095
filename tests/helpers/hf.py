"""Tiny models of transformers, and how a cut one is compared with the whole."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import tpcore
from helpers.pipelines import assert_same_gradients
from tpcore import Mesh
from tpcore.cli.app import app
from tpcore.layers.sharding import sharding
from tpcore.testing import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers.loss import loss_utils

transformers.logging.set_verbosity_error()

SPREADS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
"""Whether experts of this release take part of all; older ones are whole on each rank."""

TINY = {
    "vocab_size": 99,  # odd: the table and the head are padded
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def llama(**options: Any) -> nn.Module:
    config = {**TINY, "num_key_value_heads": 2, **options}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def folder(where: Path, architecture: str, **config: Any) -> str:
    """The directory with the ``config.json`` of a class of transformers."""
    kind = getattr(transformers, architecture).config_class.model_type
    (where / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture], **config}))
    return str(where)


def phi3() -> nn.Module:
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**TINY, num_key_value_heads=2))


def mixtral(**options: Any) -> Any:
    """With experts by the implementation that takes float64."""
    experts = {"num_key_value_heads": 4, "num_local_experts": 4, "experts_implementation": "eager"}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**TINY, **experts, **options}))


def vision() -> Any:
    """Of experts; it adds what it sees to tokens between its blocks."""
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    experts = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "rope_parameters": rope}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    seen = {"depth": 1, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4, "deepstack_visual_indexes": [0]}
    ids = {"image_token_id": 98, "video_token_id": 97, "vision_start_token_id": 96}
    config = transformers.Qwen3VLMoeConfig(
        text_config={**sizes, **experts, **heads, "vocab_size": 99},
        vision_config={**sizes, **seen, "num_position_embeddings": 16},
        **ids,
        experts_implementation="eager",
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def text(vocab: int = 99, length: int = 8) -> dict[str, Tensor]:
    """Three sentences, one of them padded, and what to predict."""
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab, (3, length), generator=made)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


ROUNDED = loss_utils.ForCausalLMLoss


def _exact_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The causal loss in float64 where logits are: that of transformers rounds to float32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    reduction = "mean" if num_items_in_batch is None else "sum"
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction=reduction)
    return total if num_items_in_batch is None else total / num_items_in_batch


def double(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    model: Any = make().double()
    if getattr(model, "loss_function", None) is ROUNDED:
        model.loss_function = _exact_loss
    return model


def step(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(loss in training, loss and logits in evaluation), gradients in the parameters."""
    model.train()
    loss = model(**batch).loss
    loss.backward()
    model.eval()
    with torch.no_grad():
        output = model(**batch)
    return loss.detach(), output.loss, output.logits


def recomputed(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """``step`` with activation checkpointing."""
    recompute(model)
    return step(model, batch)


Batches = Sequence[Sequence[dict[str, Any]]]
"""By step, and then by the rank that has this part of the batch."""


def steps(model: Any, optimizer: Any, batches: Batches, update: Callable[[], Tensor]) -> list[float]:
    """Of each step the loss, the mean of its parts', and what ``update`` says of the gradients: their norm."""
    found = []
    for parts in batches:
        optimizer.zero_grad()
        loss = torch.stack([model(**part).loss for part in parts]).mean()
        loss.backward()
        found += [float(loss.detach()), float(update())]
    return found


def plain_steps(
    model: Any, optimizer: Any, batches: Batches, clip: Callable[..., Tensor] = nn.utils.clip_grad_norm_
) -> list[float]:
    """Those of one process, which clips gradients to a norm of 0.5."""

    def update() -> Tensor:
        norm = clip(model.parameters(), 0.5)
        optimizer.step()
        return norm

    return steps(model, optimizer, batches, update)


def parallel_steps(ctx: tpcore.ParallelContext, model: Any, optimizer: Any, batches: Batches) -> list[float]:
    """Those of ranks, each of which has its part of every batch."""
    mine = [[parts[ctx.index(ctx.batch)]] for parts in batches]
    found = torch.tensor(
        steps(model, optimizer, mine, lambda: tpcore.optimizer_step(optimizer, max_norm=0.5)), dtype=torch.float64
    )
    found[::2] = ctx.batch.all_reduce(found[::2].contiguous()) / ctx.batch.size
    return found.tolist()


def assert_equals_whole(
    make: Callable[[], nn.Module],
    meshes: Sequence[int | dict[str, int]] = (2, 4),
    batch: dict[str, Any] | None = None,
    run: Callable[[Any, dict[str, Any]], Sequence[Tensor]] = step,
    tolerance: float = 1e-12,  # float64, in which the order of sums is all that differs
    made: Callable[[Callable[[], nn.Module]], Any] = double,
    **options: Any,
) -> None:
    """What ``run`` gives and every gradient of a cut model are those of the whole, on each mesh, or degree of tp."""
    batch = text() if batch is None else batch
    whole = made(make)
    want = run(whole, batch)
    names = [name for name, _ in whole.named_parameters()]

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = made(make)
        before, staged = list(model.parameters()), ctx.mesh.axes.get("pp", 1) > 1
        assert tpcore.parallelize(model, **options) is model
        assert staged or all(a is b for a, b in zip(before, model.parameters(), strict=True))
        for got, expected in zip(run(model, batch), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert staged or [name for name, _ in model.named_parameters()] == names
        if ctx.mesh.axes.keys() != {"tp"}:
            tpcore.reduce_gradients(model)
        assert_same_gradients(model, whole, ctx, tolerance, tolerance)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_utils, "ForCausalLMLoss", _exact_loss)  # parallelize takes it for transformers' own
        for mesh in meshes:
            run_ranks(Mesh({"tp": mesh} if isinstance(mesh, int) else mesh), rank)


def refused(words: str, make: Callable[[], Any], mesh: dict[str, int] | None = None, **options: Any) -> None:
    """``parallelize`` raises a ValueError on every rank, and the model is as it was."""

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = make()
        before = {name: (type(p), p.shape) for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match=words):
            tpcore.parallelize(model, **options)
        assert {name: (type(p), p.shape) for name, p in model.named_parameters()} == before
        assert not any(isinstance(m, tpcore.ParallelModule) for m in model.modules())

    run_ranks(Mesh(mesh or {"tp": 2}), rank)


def part(value: Tensor, p: Tensor) -> Tensor:
    """What this rank holds of ``value``, as ``p`` lies on the mesh."""
    found = sharding(p)
    return value if found is None else found.layout.shard(value, found.ctx.rank, found.ctx.mesh)


def consolidate(source: Path, out: Path, config: Path, *options: str, exit_code: int = 0) -> str:
    """What the command says that writes a checkpoint's model as transformers' files."""
    command = ["checkpoint", "consolidate", str(source), str(out), "--config", str(config), *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == exit_code, done.output
    return done.output


def recompute(model: Any, **options: Any) -> None:
    """Turn activation checkpointing on, which transformers gave another name in 5.23. ``options``: of torch's."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options or None)
