"""BERT and what is built like it: attention.self, attention.output, intermediate, output."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    layer = "encoder.layer.*"
    attentions = (f"{layer}.attention", f"{layer}.crossattention")
    return {
        **{f"{a}.self.{name}": "colwise" for a in attentions for name in ("query", "key", "value")},
        **{f"{a}.output.dense": "rowwise" for a in attentions},
        f"{layer}.intermediate.dense": "colwise",
        f"{layer}.output.dense": "rowwise",
    }
