"""Ranks and sizes of the job, also before initialization."""

from __future__ import annotations

from tpcore import settings
from tpcore.runtime.context import current, is_initialized

from ..utils import ordinal

__all__ = ["global_ordinal", "local_ordinal", "world_size"]


def global_ordinal() -> int:
    """This process's rank in the job."""
    return ordinal()


def local_ordinal() -> int:
    """This process's rank among those of its host."""
    return ordinal(local=True)


def world_size() -> int:
    """The number of processes."""
    return current().mesh.size if is_initialized() else settings.WORLD_SIZE.get()
