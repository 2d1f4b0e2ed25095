"""CPU backend: torch.distributed over gloo, with calls checked and lost ranks named."""

from __future__ import annotations

from tpcore.backend.interface import Backend, hookimpl

from .backend import GlooBackend
from .gloo import GlooTransport

__all__ = ["GlooBackend", "GlooTransport"]


@hookimpl
def tpcore_backend() -> type[Backend]:
    return GlooBackend
