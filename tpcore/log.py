"""Messages for the person who runs a job: the logger ``tpcore`` and its default handler."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("tpcore")


class _Lines(logging.Handler):
    """Writes ``tpcore: message`` to stderr, unless the program has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _configured():
            # the present sys.stderr, which may be redirected; one call, so that lines stay whole
            sys.stderr.write(f"{self.format(record)}\n")


_lines = _Lines()
_lines.setFormatter(logging.Formatter("tpcore: %(message)s"))
log.addHandler(_lines)


def _configured() -> bool:
    """Whether the program has set up logging, for ``tpcore`` by name or for the root logger."""
    return log.handlers != [_lines] or (log.propagate and bool(logging.getLogger().handlers))


def inform(message: str) -> None:
    """Report progress: printed by default, logged as INFO if the program configures logging."""
    if _configured() or log.level:
        log.info(message)
    else:  # bypasses the level, which is WARNING unless the program sets one
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, message, (), None))


def on_terminal() -> bool:
    """Whether a person reads stderr, whatever object stands for it."""
    return bool(getattr(sys.stderr, "isatty", bool)())


def inform_of_start(ranks: int) -> None:
    """Say on a terminal that ranks start: they take some seconds to say anything themselves."""
    if on_terminal():
        inform(f"starting {ranks} rank{'s' * (ranks > 1)}")


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the block nothing below a warning is said."""
    level = log.level
    log.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def hold_lines() -> Iterator[None]:
    """Inside the block other threads' messages wait: some other code has replaced ``sys.stderr``."""
    _lines.acquire()
    try:
        yield
    finally:
        _lines.release()
