"""The norm, by its NeuronX Distributed path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import layers


class RMSNorm(layers.RMSNorm):
    """``tpcore.RMSNorm``; ``sequence_parallel_enabled`` is its ``sequence_parallel``."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-6,
        *,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            sequence_parallel=sequence_parallel_enabled,
            group=tensor_model_parallel_group,
            **options,
        )

    @property
    def sequence_parallel_enabled(self) -> bool:
        return self.sequence_parallel


__all__ = ["RMSNorm"]
