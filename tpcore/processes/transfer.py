"""Pickles functions, results and errors for their way between processes."""

from __future__ import annotations

import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CollectiveTimeoutError, PeerLostError, described


class RankTraceback(Exception):
    """The traceback text of an error from another process, attached to that error as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Outcome:
    """How a function ended on one rank."""

    value: Any = None
    error: BaseException | None = None
    at: float = 0.0  # wall clock at the end, to find the first of several errors


def outcome_of(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(call(), at=time.time())
    except BaseException as e:  # noqa: BLE001  passed to the calling process
        return Outcome(error=e, at=time.time())


def root_cause(outcomes: Sequence[Outcome]) -> BaseException | None:
    """The earliest error that is not the consequence of another rank's."""
    failed = [o for o in outcomes if o.error is not None]
    failed.sort(key=lambda o: (isinstance(o.error, (PeerLostError, CollectiveTimeoutError)), o.at))
    return failed[0].error if failed else None


def _pickler() -> Any:
    """cloudpickle, which pickles closures and classes of __main__ by value; pickle if it is not installed."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle
    return cloudpickle


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call together with ``sys.path``. ValueError if it cannot be pickled."""
    pickler = _pickler()
    hint = "" if pickler is not pickle else ": pip install cloudpickle, or define it in a module"
    if pickler is pickle and getattr(fn, "__module__", None) == "__main__":
        raise ValueError(f"{fn!r} of __main__ cannot be imported by other processes{hint}")
    try:
        return pickle.dumps((list(sys.path), pickler.dumps((fn, args, kwargs))))
    except Exception as e:
        what = f"{fn!r} or its arguments cannot be sent to other processes"
        raise ValueError(f"{what} ({type(e).__name__}: {e}){hint}") from e


def unpack_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    path, call = pickle.loads(data)
    sys.path[:] = path
    fn, args, kwargs = pickle.loads(call)
    return fn, args, kwargs


def pack_outcome(outcome: Outcome, rank: int) -> bytes:
    """Pickle an outcome. A stand-in error replaces a value or an error that cannot be pickled."""
    error = outcome.error
    text = "" if error is None else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        data = _pickler().dumps(outcome)
        pickle.loads(data)
    except Exception as e:  # noqa: BLE001  whatever a user's object raises when it is pickled
        stand_in: Exception = RuntimeError(f"{type(error).__name__}: {error}")
        if error is None:
            what = f"the result of rank {rank} cannot be sent to the caller"
            stand_in = ValueError(f"{what} ({type(e).__name__}: {e})")
        data = pickle.dumps(Outcome(None, stand_in, outcome.at))
    return pickle.dumps((rank, text, data))


def unpack_outcome(packed: bytes) -> Outcome:
    rank, text, data = pickle.loads(packed)
    outcome: Outcome = pickle.loads(data)
    if outcome.error is not None:
        outcome.error.__cause__ = RankTraceback(f"rank {rank}:\n{text}".rstrip())
    return outcome


def death(rank: int, code: int) -> PeerLostError:
    """The error for a rank that left no outcome. ``code``: its exit code, as subprocess returns it."""
    return PeerLostError(f"rank {rank} {described(code)}")
