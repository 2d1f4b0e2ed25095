"""A base class for backends over torch.distributed, for third parties too. The core never imports it."""

from __future__ import annotations

from .backend import C10dBackend
from .transport import C10dTransport

__all__ = ["C10dBackend", "C10dTransport"]
