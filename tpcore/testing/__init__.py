"""Ranks as threads, for tests of models and of backends."""

from .threads import ThreadBackend, run_ranks

__all__ = ["ThreadBackend", "run_ranks"]
