"""ZeRO-1: each data-parallel rank keeps the optimizer's state for its part of every parameter."""

from .chunk import ReadRun
from .optimizer import Zero1
from .state import fitted, renumbered

__all__ = ["ReadRun", "Zero1", "fitted", "renumbered"]
