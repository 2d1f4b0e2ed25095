"""Collectives of one group: the table of primitives, checks, graph operators, differentiable mappings."""

from .comm import Comm
from .transport import Transport

__all__ = ["Comm", "Transport"]
