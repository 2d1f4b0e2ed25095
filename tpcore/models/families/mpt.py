"""MPT: q|k|v in one layer, and a bias of each head by distance as an argument."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    return {
        "blocks.*.attn": "heads_argument",
        "blocks.*.attn.Wqkv": "qkv_colwise",
        "blocks.*.attn.out_proj": "rowwise",
        "blocks.*.ffn.up_proj": "colwise",
        "blocks.*.ffn.down_proj": "rowwise",
    }
