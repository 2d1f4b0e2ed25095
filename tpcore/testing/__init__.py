"""For tests of models and of backends: ranks without processes."""

from .threads import ThreadBackend, run_ranks

__all__ = ["ThreadBackend", "run_ranks"]
