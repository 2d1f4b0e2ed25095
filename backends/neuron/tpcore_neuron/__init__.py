"""Neuron backend: tensor parallelism on Trainium and Inferentia, through PyTorch/XLA."""

from __future__ import annotations

from tpcore.backend import Backend, hookimpl

from .backend import NeuronBackend

__all__ = ["NeuronBackend"]


@hookimpl
def tpcore_backend() -> type[Backend]:
    return NeuronBackend
