"""ALBERT: all layers share one group of parameters."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    layer = "encoder.albert_layer_groups.*.albert_layers.*"
    return {
        **{f"{layer}.attention.{name}": "colwise" for name in ("query", "key", "value")},
        f"{layer}.attention.dense": "rowwise",
        f"{layer}.ffn": "colwise",
        f"{layer}.ffn_output": "rowwise",
    }
