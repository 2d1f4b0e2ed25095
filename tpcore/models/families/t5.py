"""T5 and similar models: the bias of each head by distance is cut like the heads."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    layer = "block.*.layer.*"
    attentions = [f"{layer}.{name}" for name in ("SelfAttention", "EncDecAttention", "LocalSelfAttention")]
    return {
        **{f"{a}.{name}": "colwise" for a in attentions for name in "qkv"},
        **{f"{a}.o": "rowwise" for a in attentions},
        **{f"{a}.relative_attention_bias": "embedding_heads" for a in attentions},
        **{f"{layer}.DenseReluDense.{name}": "colwise" for name in ("wi", "wi_0", "wi_1")},
        f"{layer}.DenseReluDense.wo": "rowwise",
    }
