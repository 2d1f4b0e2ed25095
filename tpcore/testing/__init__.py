"""Ranks as threads, for tests of models and of backends."""

from .threads import ThreadBackend, run_ranks
from .twin import compare

__all__ = ["ThreadBackend", "compare", "run_ranks"]
