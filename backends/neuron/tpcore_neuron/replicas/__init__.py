"""Real XLA programs with real collectives on N replicas in one process, for tests without hardware."""

from __future__ import annotations

from .api import lower, programs, run_replicas
from .stablehlo import HloCollective, HloProgram

__all__ = ["HloCollective", "HloProgram", "lower", "programs", "run_replicas"]
