"""GPT-2 and the first GPT: Conv1D layers, q|k|v in one layer."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    return {
        "h.*.attn.c_attn": "qkv_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.crossattention.q_attn": "colwise",
        "h.*.crossattention.c_attn": "packed_colwise",
        "h.*.crossattention.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
