"""Models with Llama's names but without its plan."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    attention = "layers.*.self_attn"
    return {
        **{f"{attention}.{name}_proj": "colwise" for name in "qkv"},
        f"{attention}.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
