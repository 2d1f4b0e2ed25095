"""GPT-Neo: the projections are in attention.attention."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    return {
        **{f"h.*.attn.attention.{name}_proj": "colwise" for name in "qkv"},
        "h.*.attn.attention.out_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
