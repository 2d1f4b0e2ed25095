"""Exceptions for everything but bad arguments, which raise ValueError."""

from __future__ import annotations


class BackendError(RuntimeError):
    """A backend is missing, is broken, or cannot run on this machine."""


class CollectiveMismatchError(BackendError):
    """Ranks of one group were about to run different collectives; nothing was exchanged."""


class PeerLostError(BackendError):
    """Another rank died, left or failed, so a collective can never complete."""


class CollectiveTimeoutError(BackendError):
    """A rank did not join a collective in time."""


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged, or does not fit the model."""
