"""Real XLA programs with real collectives on N replicas of one process, for tests without hardware."""

from __future__ import annotations

from .program import Collective, Program, lower, programs
from .replicas import run_replicas

__all__ = ["Collective", "Program", "lower", "programs", "run_replicas"]
