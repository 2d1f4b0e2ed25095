"""The program that tpcore.launch starts once per rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from .transfer import Outcome, die_with, outcome_of, pack_outcome, unpack_call


def _say(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """One line: the caller of launch gets the traceback, of the one error that matters."""
    sys.stderr.write(f"tpcore: rank {os.environ['RANK']}: {kind.__name__}: {error}\n")


def _call(folder: Path) -> Any:
    fn, args, kwargs = unpack_call((folder / "call").read_bytes())
    return fn(*args, **kwargs)


def main(folder: Path, parent: int) -> None:
    die_with(parent)
    rank = int(os.environ["RANK"])
    sys.excepthook = _say  # below the hook of a backend, which tells the other ranks
    outcome = outcome_of(lambda: _call(folder))
    error = outcome.error
    if isinstance(error, SystemExit):
        said = RuntimeError(f"rank {rank} called sys.exit({error.code!r})")
        outcome = Outcome(None, None if error.code in (0, None) else said, outcome.at, outcome.seconds)
    partial = folder / f"{rank}.part"
    partial.write_bytes(pack_outcome(outcome, rank))
    partial.rename(folder / str(rank))
    if error is not None:
        raise error


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
