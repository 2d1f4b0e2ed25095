"""Real XLA programs with real collectives on N replicas of one process, for tests without hardware."""

from __future__ import annotations

from .api import run_replicas
from .stablehlo import Collective, Program, lower, programs

__all__ = ["Collective", "Program", "lower", "programs", "run_replicas"]
