"""Families with a plan in transformers for which these rules are better."""

from __future__ import annotations

from typing import Any

from ..plan import Rule

_GATED = {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"}
_ACTIVATION = {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}


def rules(config: Any) -> dict[str, Rule]:
    """Each half of a gated MLP is cut, while the model's own plan gathers both on every rank. For apertus the
    gradients of the activation's parameters are summed, because each rank has other features."""
    return {**(_ACTIVATION if config.model_type == "apertus" else _GATED)}
