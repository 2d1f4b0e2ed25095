"""A base for backends that torch.distributed drives. Core never imports it: third parties derive from it."""

from __future__ import annotations

from .backend import C10dBackend
from .transport import C10dTransport

__all__ = ["C10dBackend", "C10dTransport"]
