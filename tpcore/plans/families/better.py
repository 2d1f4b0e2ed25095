"""Families with a plan in transformers for which these rules are better."""

from __future__ import annotations

from typing import Any

from ..plan import Rule

_GATED = {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"}
_ACTIVATION = {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}


def rules(config: Any) -> dict[str, Rule]:
    """The two halves of a gated network are cut each, where the plan gathers them whole on every rank; the
    activation's parameters see this rank's features."""
    return {**(_ACTIVATION if config.model_type == "apertus" else _GATED)}
