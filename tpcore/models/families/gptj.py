"""GPT-J: attention and MLP run in parallel."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    return {
        **{f"h.*.attn.{name}_proj": "colwise" for name in "qkv"},
        "h.*.attn.out_proj": "rowwise",
        "h.*.mlp.fc_in": "colwise",
        "h.*.mlp.fc_out": "rowwise",
    }
