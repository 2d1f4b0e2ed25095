"""The job that this process is in: mesh, groups, random streams, and what its ranks agree on."""

from .memory import keep_freed_memory

__all__ = ["keep_freed_memory"]
