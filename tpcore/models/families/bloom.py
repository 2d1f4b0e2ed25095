"""BLOOM, Falcon, Persimmon and the Japanese GPT-NeoX: one layer has q, k and v of each head side by side."""

from __future__ import annotations

from typing import Any

from ...layout.shard import Block
from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    attentions = ("h.*.self_attention", "layers.*.self_attn", "layers.*.attention")
    networks = ("h.*.mlp", "layers.*.mlp")
    return {
        **{f"{a}.query_key_value": _projection(config) for a in attentions},
        **{f"{a}.dense": "rowwise" for a in attentions},
        "h.*.self_attention": "heads_argument",  # alibi
        **{f"{n}.dense_h_to_4h": "colwise" for n in networks},
        **{f"{n}.dense_4h_to_h": "rowwise" for n in networks},
    }


def _projection(config: Any) -> Rule:
    """Falcon has q|k|v with one key head, or each key and value head next to its queries."""
    if config.model_type != "falcon":
        return "colwise"
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    if config.new_decoder_architecture:
        groups = config.num_kv_heads
        return [Block((heads + 2 * groups) * size, (heads // groups + 2) * size)]
    return "qkv_colwise" if config.multi_query else "colwise"
