"""Lines for the person who runs a job: the logger ``tpcore``, and how it prints by default."""

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
            # sys.stderr as it is now, which may have been redirected; in one call, so that lines stay whole
            sys.stderr.write(f"{self.format(record)}\n")


_lines = _Lines()
_lines.setFormatter(logging.Formatter("tpcore: %(message)s"))
log.addHandler(_lines)


def _configured() -> bool:
    """Whether the program has set up logging: for ``tpcore`` by name, or for all of it."""
    return log.handlers != [_lines] or (log.propagate and bool(logging.getLogger().handlers))


def inform(message: str) -> None:
    """How the job goes: printed by default, and INFO for a program that configures logging."""
    if _configured() or log.level:
        log.info(message)
    else:  # past the level, which is WARNING where nobody has set one
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, message, (), None))


@contextmanager
def hold_lines() -> Iterator[None]:
    """Lines of other threads wait for the end of the block, in which something else owns ``sys.stderr``."""
    _lines.acquire()
    try:
        yield
    finally:
        _lines.release()
