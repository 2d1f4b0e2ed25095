"""DeBERTa 2 and 3: projections named query_proj, key_proj and value_proj; relative positions share them."""

from __future__ import annotations

from typing import Any

from ..plan import Rule


def rules(config: Any) -> dict[str, Rule]:
    layer = "encoder.layer.*"
    projections = [f"{part}{name}_proj" for part in ("", "pos_") for name in ("query", "key", "value")]
    return {
        **{f"{layer}.attention.self.{name}": "colwise" for name in projections},
        f"{layer}.attention.self.pos_dropout": "replicate",  # of positions, which all heads share
        f"{layer}.attention.output.dense": "rowwise",
        f"{layer}.intermediate.dense": "colwise",
        f"{layer}.output.dense": "rowwise",
        # the head without a matrix of its own reads the table's
        **({} if config.legacy else {"embeddings.word_embeddings": "replicate"}),
    }
