"""DistilBERT, XLM and FlauBERT: projections named q_lin, k_lin, v_lin and out_lin."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    attentions = ("transformer.layer.*.attention", "attentions.*", "encoder_attn.*")
    networks = ("transformer.layer.*.ffn", "ffns.*")
    return {
        **{f"{a}.{name}_lin": "colwise" for a in attentions for name in "qkv"},
        **{f"{a}.out_lin": "rowwise" for a in attentions},
        **{f"{n}.lin1": "colwise" for n in networks},
        **{f"{n}.lin2": "rowwise" for n in networks},
    }
