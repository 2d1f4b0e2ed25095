"""Descriptions of how a process ended."""

from __future__ import annotations

import signal

_NAMES = {s.value: s.name for s in signal.Signals}


def described(code: int) -> str:
    """``code``: a ``subprocess`` return code, which is minus the signal's number for a killed process."""
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {_NAMES.get(-code, f'signal {-code}')}"
