"""Families with a plan in transformers for which these rules are better."""

from __future__ import annotations

from typing import Any

from ..plan import Rule

_GATED = {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"}
_FUSED = {"layers.*.self_attn.qkv_proj": "qkv_colwise", "layers.*.self_attn.o_proj": "rowwise"}
_ACTIVATION = {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}


def rules(config: Any) -> dict[str, Rule]:
    """Cut each half of a gated MLP, and each of q|k|v by its heads, which the model's own plan gathers.

    For apertus the gradients of the activation's parameters are summed, because each rank has other features.
    The families of OLMo 2 stay as transformers cuts them, with q, k and v gathered: their norms of queries
    and of keys take the mean over the features of all heads, which no rank has alone.
    """
    if config.model_type == "apertus":
        return {**_ACTIVATION}
    return {**_GATED, **(_FUSED if config.model_type == "phi3" else {})}
