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

import tpcore
from tpcore import Mesh
from tpcore.layers.sharding import sharding
from tpcore.testing import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

transformers.logging.set_verbosity_error()

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


def llama(**options: Any) -> nn.Module:
    config = {**TINY, "num_key_value_heads": 2, **options}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def folder(where: Path, architecture: str, **config: Any) -> str:
    """The directory with the ``config.json`` of a class of transformers."""
    kind = getattr(transformers, architecture).config_class.model_type
    (where / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture], **config}))
    return str(where)


def text(vocab: int = 99, length: int = 8) -> dict[str, Tensor]:
    """Three sentences, one of them padded, and what to predict."""
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab, (3, length), generator=made)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def exact_loss(model: Any) -> Any:
    """``model`` with a causal loss in its own precision: that of transformers rounds to float32."""
    if type(model.loss_function).__name__ != "function" or "ForCausalLM" not in model.loss_function.__name__:
        return model

    def loss(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        targets = F.pad(labels, (0, 1), value=-100)[..., 1:] if shift_labels is None else shift_labels
        if num_items_in_batch is None:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_items_in_batch

    loss.__name__ = model.loss_function.__name__
    model.loss_function = loss
    return model


def double(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return exact_loss(make().double())


def step(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(loss in training, loss and logits in evaluation), gradients in the parameters."""
    model.train()
    loss = model(**batch).loss
    loss.backward()
    model.eval()
    with torch.no_grad():
        output = model(**batch)
    return loss.detach(), output.loss, output.logits


def assert_equals_whole(
    make: Callable[[], nn.Module],
    degrees: Sequence[int] = (2, 4),
    batch: dict[str, Tensor] | None = None,
    run: Callable[[Any, dict[str, Tensor]], tuple[Tensor, ...]] = step,
    tolerance: float = 1e-12,  # float64, in which the order of sums is all that differs
    **options: Any,
) -> None:
    """What ``run`` gives and every gradient of a cut model are those of the whole, at each degree."""
    batch = text() if batch is None else batch
    whole = double(make)
    want = run(whole, batch)
    gradients = {name: p.grad for name, p in whole.named_parameters()}

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = double(make)
        before = list(model.parameters())
        assert tpcore.parallelize(model, **options) is model
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        for got, expected in zip(run(model, batch), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert [name for name, _ in model.named_parameters()] == list(gradients)
        for name, p in model.named_parameters():
            found, expected = sharding(p), gradients[name]
            if expected is None:
                assert p.grad is None, name
                continue
            if found is not None:
                expected = found.layout.spec.shard(expected, ctx.coord("tp"), ctx.comm("tp").size)
            torch.testing.assert_close(
                p.grad, expected, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
            )

    for degree in degrees:
        run_ranks(Mesh({"tp": degree}), rank)


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


def recompute(model: Any) -> None:
    """Turn activation checkpointing on, which transformers gave another name in 5.23."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
