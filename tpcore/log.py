"""Lines for the person who runs a job."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """A line for the person who started the job."""
    sys.stderr.write(f"tpcore: {message}\n")
