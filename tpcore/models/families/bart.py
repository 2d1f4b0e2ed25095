"""BART and similar models: self_attn, encoder_attn, fc1 and fc2 are in the layer itself."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    attentions = ("layers.*.self_attn", "layers.*.encoder_attn", "layers.*.self_attn.self")
    return {
        **{f"{a}.{name}_proj": "colwise" for a in attentions for name in "qkv"},
        **{f"{a}.out_proj": "rowwise" for a in attentions},
        "layers.*.fc1": "colwise",
        "layers.*.fc2": "rowwise",
    }
