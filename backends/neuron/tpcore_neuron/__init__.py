"""Neuron backend: tensor parallelism on Trainium and Inferentia, over PyTorch/XLA or AWS's native PyTorch."""

from __future__ import annotations

from tpcore.backend.interface import Backend, hookimpl
from tpcore.log import inform
from tpcore.settings import LOCAL_RANK

from . import platform
from .backend import NativeBackend, NeuronBackend

__all__ = ["NativeBackend", "NeuronBackend"]


@hookimpl
def tpcore_backend() -> type[Backend]:
    """The backend for the installed packages: PyTorch/XLA, unless torch-neuronx is the native one."""
    if not platform.has_native():
        return NeuronBackend
    version = platform.installed("torch-neuronx")
    if LOCAL_RANK.get() == 0:
        inform(f"neuron: native backend ({'stand-in' if version is None else f'torch-neuronx {version} is installed'})")
    return NativeBackend
