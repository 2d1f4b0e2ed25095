"""Encoders of images and speech: CLIP, SigLIP, ViT, DINOv2, wav2vec 2.0 and similar models."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    layers = ("layers.*", "encoder.layers.*", "encoder.layer.*")
    attentions = [f"{layer}.{name}" for layer in layers for name in ("self_attn", "attention")]
    networks = [f"{layer}.mlp.{name}" for layer in layers for name in ("fc1", "fc2")]
    speech = [f"{layer}.feed_forward.{name}" for layer in layers for name in ("intermediate_dense", "output_dense")]
    return {
        **{f"{a}.{name}_proj": "colwise" for a in attentions for name in "qkv"},
        **{f"{a}.{name}": "rowwise" for a in attentions for name in ("out_proj", "o_proj")},
        **({"layers.*.attention": "heads_argument"} if config.model_type == "beit" else {}),
        **{
            name: "colwise" if name.endswith(("fc1", "intermediate_dense")) else "rowwise" for name in networks + speech
        },
    }
