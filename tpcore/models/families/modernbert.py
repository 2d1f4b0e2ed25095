"""ModernBERT: q|k|v in one layer, and a gated MLP whose two halves are one layer."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    return {
        "layers.*.attn.Wqkv": "qkv_colwise",
        **{f"layers.*.attn.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.attn.Wo": "rowwise",
        "layers.*.mlp.Wi": "packed_colwise",
        "layers.*.mlp.Wo": "rowwise",
    }
