"""How a process ended, in words."""

from __future__ import annotations

import signal

_NAMES = {s.value: s.name for s in signal.Signals}


def described(code: int) -> str:
    """``code``: as ``subprocess`` has it, minus the signal's number for a process that was killed."""
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {_NAMES.get(-code, f'signal {-code}')}"
