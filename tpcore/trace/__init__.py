"""Traced models: one program for all ranks, separate weights per rank, called from one plain process."""

from __future__ import annotations

from .api import parallel_model_load, parallel_model_save, parallel_model_trace
from .serve.generate import generate, generate_each
from .serve.model import TensorParallelModel

__all__ = [
    "TensorParallelModel",
    "generate",
    "generate_each",
    "parallel_model_load",
    "parallel_model_save",
    "parallel_model_trace",
]
