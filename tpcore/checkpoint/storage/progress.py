"""Progress of a long operation, in bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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


@contextmanager
def bar(title: str, total: int, *, shown: bool) -> Iterator[Progress | None]:
    """Progress of ``total`` bytes as a tqdm bar. None unless ``shown``, and without tqdm or a terminal."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    with tqdm(desc=title, total=total, unit="B", unit_scale=True, leave=False, dynamic_ncols=True) as made:
        yield Progress(lambda done, _: made.update(done - made.n))
