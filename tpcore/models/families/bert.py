"""BERT and similar models: attention.self (or .attention), attention.output, intermediate, output."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    layer = "encoder.layer.*"
    attentions = [f"{layer}.{name}" for name in ("attention", "crossattention")]
    projections = [f"{inner}.{name}" for inner in ("self", "attention") for name in ("query", "key", "value")]
    return {
        **{f"{a}.{p}": "colwise" for a in attentions for p in projections},
        **{f"{a}.output.dense": "rowwise" for a in attentions},
        f"{layer}.intermediate.dense": "colwise",
        f"{layer}.output.dense": "rowwise",
        f"{layer}.output.adapter_modules": "replicate",
    }
