"""How far a long piece of work has come, in bytes: told by who does it, shown by who wants to see it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Tick = Callable[[int], object]
"""Called with the bytes of each step."""
Tell = Callable[[int, int], object]
"""Called with the bytes that are done and those that there are, before the first step and after each."""


def nothing(*_: int) -> None:
    pass


class Steps:
    """Adds up: to be called as a Tick, calls a Tell."""

    def __init__(self, total: int, tell: Tell) -> None:
        self._done, self._total, self._tell = 0, total, tell
        tell(0, total)

    def __call__(self, step: int) -> None:
        self._done += step
        self._tell(self._done, self._total)


class Bar:
    """A Tell that shows a bar of tqdm on a terminal; elsewhere, or without tqdm, nothing."""

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
