"""The program that tpcore.launch starts once per rank. Arguments: file descriptors LIFELINE CALL RESULT."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from ..log import log
from ..runtime.memory import keep_freed_memory
from ..settings import RANK
from .shared_memory import read_file, write_file
from .spawn import follow
from .transfer import Outcome, outcome_of, pack_outcome, unpack_call


def _log(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """Log one line. The caller of ``launch`` gets the root cause with its traceback."""
    log.error("rank %d: %s: %s", RANK.get(), kind.__name__, error)


def main(lifeline: int, call: int, result: int) -> None:
    def run() -> Any:
        fn, args, kwargs = unpack_call(read_file(call))
        return fn(*args, **kwargs)

    follow(lifeline)
    keep_freed_memory()
    rank = RANK.get()
    sys.excepthook = _log  # a backend's own hook, which informs the other ranks, calls this one
    outcome = outcome_of(run)
    error = outcome.error
    if isinstance(error, SystemExit):
        exited = RuntimeError(f"rank {rank} called sys.exit({error.code!r})")
        outcome = Outcome(None, None if error.code in (0, None) else exited, outcome.at)
    write_file(result, pack_outcome(outcome, rank))
    if error is not None:
        raise error


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
