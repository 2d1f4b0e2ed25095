"""MPNet: attention.attn has q, k, v and o; a bias of each head by distance is outside the layers."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    layer = "encoder.layer.*"
    return {
        **{f"{layer}.attention.attn.{name}": "colwise" for name in "qkv"},
        f"{layer}.attention.attn.o": "rowwise",
        "encoder.relative_attention_bias": "embedding_heads",
        f"{layer}.intermediate.dense": "colwise",
        f"{layer}.output.dense": "rowwise",
    }
