"""Exceptions for everything but bad arguments, which raise ValueError."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from .extras import tell_untested


class BackendError(RuntimeError):
    """A backend is missing, is broken, or cannot run on this machine."""


def refuse_forked(pid: int, rank: int) -> None:
    """Raise BackendError in a process that was forked from ``rank``, whose process is ``pid``."""
    if os.getpid() != pid:
        raise BackendError(
            f"this process was forked from rank {rank} after tpcore.init, and would take that rank's place "
            "in its job: start it before tpcore.init, or by the methods 'spawn' or 'forkserver'"
        )


class CollectiveMismatchError(BackendError):
    """Ranks of one group were about to run different collectives; nothing was exchanged."""


class PeerLostError(BackendError):
    """Another rank died, left or failed, so a collective can never complete."""


class CollectiveTimeoutError(BackendError):
    """A rank did not join a collective in time."""


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged, or does not fit the model."""


@contextmanager
def extra(name: str, user: str) -> Iterator[None]:
    """For imports that ``user`` needs of the extra ``name``: the error says how to install a missing library, a warning
    which versions were tested."""
    try:
        yield
    except ModuleNotFoundError as e:
        missing = (e.name or "").partition(".")[0]
        if not missing or missing.startswith("tpcore"):  # transformers raises one without a name, and says why
            raise
        text = f"{user} needs {missing}, which is not installed: pip install 'tpcore[{name}]'"
        raise ModuleNotFoundError(text, name=e.name) from None
    tell_untested(name)


_NAMES = {s.value: s.name for s in signal.Signals}


def described(code: int) -> str:
    """``code``: a ``subprocess`` return code, which is minus the signal's number for a killed process."""
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {_NAMES.get(-code, f'signal {-code}')}"


def counted(n: int, noun: str) -> str:
    """``n`` and the noun, in the plural but for one: 1 rank, 2 ranks."""
    return f"{n} {noun}{'' if n == 1 else 'es' if noun.endswith('s') else 's'}"
