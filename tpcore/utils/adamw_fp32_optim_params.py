"""The float32 AdamW, by its NeuronX Distributed path."""

from ..integrations.nxd.adamw import AdamW_FP32OptimParams

__all__ = ["AdamW_FP32OptimParams"]
