"""CUDA backend: one rank a GPU over NCCL, or ranks that share GPUs over gloo."""

from __future__ import annotations

from tpcore.backend.interface import Backend, hookimpl
from tpcore.settings import Variable, one_of

from .backend import CudaBackend, CudaOverGloo

__all__ = ["CudaBackend", "CudaOverGloo"]

TRANSPORT: Variable[type[CudaBackend]] = Variable(
    "TPCORE_CUDA_TRANSPORT", one_of({"nccl": CudaBackend, "gloo": CudaOverGloo}), CudaBackend
)


@hookimpl
def tpcore_backend() -> type[Backend]:
    return TRANSPORT.get()
