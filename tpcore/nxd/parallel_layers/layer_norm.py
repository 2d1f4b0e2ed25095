"""The sequence-parallel norm under its NeuronX Distributed path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import layers


class LayerNorm(layers.LayerNorm):
    """``tpcore.LayerNorm``; ``sequence_parallel_enabled`` is its ``sequence_parallel``."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = torch.float32,
        *,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: Any = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            bias,
            device,
            dtype,
            sequence_parallel=sequence_parallel_enabled,
            group=tensor_model_parallel_group,
        )

    @property
    def sequence_parallel_enabled(self) -> bool:
        return self.sequence_parallel


__all__ = ["LayerNorm"]
