"""The vision towers of Qwen2-VL and Qwen2.5-VL: q|k|v in one layer, and a network with or without a gate."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    return {
        "blocks.*.attn.qkv": "qkv_colwise",
        "blocks.*.attn.proj": "rowwise",
        **{f"blocks.*.mlp.{name}": "colwise" for name in ("fc1", "gate_proj", "up_proj")},
        **{f"blocks.*.mlp.{name}": "rowwise" for name in ("fc2", "down_proj")},
    }
