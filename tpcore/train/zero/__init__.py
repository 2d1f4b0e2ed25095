"""ZeRO-1: each data-parallel rank keeps the optimizer's state for its part of every parameter."""

from .chunk import ReadRun
from .optimizer import Zero1
from .state import OF_SUMS, SUMS, fitted, renumbered

__all__ = ["OF_SUMS", "SUMS", "ReadRun", "Zero1", "fitted", "renumbered"]
