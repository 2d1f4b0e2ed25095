"""Progress of a long operation, in bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Progress:
    """Counts bytes. ``show(done, total)`` is called at the start and after each step."""

    def __init__(self, show: Callable[[int, int], object]) -> None:
        self._show, self._done, self._total = show, 0, 0

    def start(self, total: int) -> None:
        self._done, self._total = 0, total
        self._show(0, total)

    def add(self, step: int) -> None:
        self._done += step
        self._show(self._done, self._total)


class Bar:
    """A tqdm bar, for use as ``show`` of a ``Progress``. Shows nothing without tqdm or a terminal."""

    def __init__(self, title: str) -> None:
        self._title, self._bar = title, None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = _bar(self._title, total)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(title: str, total: int) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=title, total=total, unit="B", unit_scale=True, leave=False, dynamic_ncols=True)
