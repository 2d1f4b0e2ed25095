"""The plugin interface: the Backend class, its declared capabilities, and the registry of plugins."""

from __future__ import annotations

from .interface import INTERFACE, Backend, Capabilities, ProgramInfo, hookimpl
from .registry import BackendInfo, backend_class, backends, load_backend

__all__ = [
    "INTERFACE",
    "Backend",
    "BackendInfo",
    "Capabilities",
    "ProgramInfo",
    "backend_class",
    "backends",
    "hookimpl",
    "load_backend",
]
