"""``TPCORE_DRILLS=all``, as ``make drills`` sets it: the long form of what is tested in samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

ALL = os.environ.get("TPCORE_DRILLS") == "all"


def only(reason: str) -> pytest.MarkDecorator:
    """Marks a test that runs with the drills alone."""
    return pytest.mark.skipif(not ALL, reason=f"{reason}: TPCORE_DRILLS=all")


def sample(every: Sequence[T], some: Sequence[T]) -> list[T]:
    """``some``; with the drills ``every``."""
    return list(every if ALL else some)
