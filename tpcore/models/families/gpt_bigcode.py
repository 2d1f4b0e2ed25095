"""GPT BigCode: many query heads with one key and value head, or q, k and v of each head side by side."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    return {
        "h.*.attn.c_attn": "qkv_colwise" if config.multi_query else "colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
