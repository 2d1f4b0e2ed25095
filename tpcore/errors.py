"""What can go wrong that is not a bad argument (those are ValueError)."""

from __future__ import annotations


class BackendError(RuntimeError):
    """A backend is missing, broken or unfit for this machine."""


class CollectiveMismatchError(BackendError):
    """Ranks of one group were about to run different collectives; nothing was exchanged."""


class PeerLostError(BackendError):
    """Another rank died, left or failed, so a collective can never complete."""


class CollectiveTimeoutError(BackendError):
    """A rank did not come to a collective in time."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing something, damaged, or does not fit the model."""
