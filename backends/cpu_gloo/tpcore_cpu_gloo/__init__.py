"""CPU backend: torch.distributed over gloo. Calls are checked, and errors name lost ranks."""

from __future__ import annotations

from tpcore.backend.interface import Backend, hookimpl

from .backend import GlooBackend, GlooTransport

__all__ = ["GlooBackend", "GlooTransport"]


@hookimpl
def tpcore_backend() -> type[Backend]:
    return GlooBackend
