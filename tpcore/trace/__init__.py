"""Traced models: one program for all ranks, weights apart, served from one plain process."""

from __future__ import annotations

from .model import TensorParallelModel
from .published import parallel_model_load, parallel_model_save, parallel_model_trace

__all__ = ["TensorParallelModel", "parallel_model_load", "parallel_model_save", "parallel_model_trace"]
