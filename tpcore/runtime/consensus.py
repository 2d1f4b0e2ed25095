"""Agreement of ranks: errors that all raise together, so that none waits for one that failed."""

from __future__ import annotations

import builtins
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from difflib import unified_diff
from typing import Any, Protocol, TypeVar

import torch

from .. import errors
from ..comm.comm import Comm
from ..errors import BackendError

T = TypeVar("T")

_LEAST = 64  # bytes of the shortest message on backends that compile a program for each length
_LINES = 12  # differing lines in a message
_LIMIT = 4096  # characters of a message that are sent


def gather_bytes(data: bytes, comm: Comm) -> list[bytes]:
    """The ``data`` of every rank of the group, in group order. Collective."""
    device = comm.position.device
    length = torch.tensor([len(data)], device="cpu").to(device)
    lengths = [int(n) for n in comm.all_gather(length, 0).tolist()]
    room = max(lengths)
    if not room:  # as after work that failed on no rank
        return [b""] * len(lengths)
    if not comm.eager:  # otherwise each length would compile a program of its own
        room = max(_LEAST, 1 << (room - 1).bit_length())
    padded = torch.zeros((1, room), dtype=torch.uint8, device="cpu")
    padded[0, : len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    rows = comm.all_gather(padded.to(device), 0).cpu()
    return [bytes(row[:n].tolist()) for row, n in zip(rows, lengths, strict=True)]


def gather(value: Any, comm: Comm) -> list[Any]:
    """The ``value`` of every rank of the group, which JSON can represent, in group order. Collective."""
    return [json.loads(text) for text in gather_bytes(json.dumps(value).encode(), comm)]


def agree(values: Sequence[T], error: Callable[[int, T, T], Exception]) -> T:
    """The value that all ranks have, of the ``values`` of each. Otherwise ``error(rank, first, other)`` is
    raised on all ranks: it names the first rank whose value ``other`` is not the ``first`` rank's."""
    first = values[0]
    for rank, other in enumerate(values):
        if other != first:
            raise error(rank, first, other)
    return first


def check_one_program(text: bytes, constants: bytes, world: Comm) -> None:
    """Raise BackendError on all ranks if they have traced different programs: all ranks will run the program
    of rank 0. ``text``: the program; the message shows the lines that differ. Collective."""

    def error(other: int, *digests: bytes) -> BackendError:
        texts = gather_bytes(text, world)
        first_lines, other_lines = (t.decode().splitlines() for t in (texts[0], texts[other]))
        lines = [line for line in unified_diff(first_lines, other_lines, lineterm="", n=0) if line[0] in "+-"][2:]
        shown = "\n".join(line[:200] for line in lines[:_LINES])
        return BackendError(
            f"ranks 0 and {other} would need different programs, but one program must serve all ranks: the "
            "model's forward uses the rank as a Python number, or a tensor that is no buffer\n"
            f"{shown or 'their constants differ'}"
        )

    agree(gather_bytes(hashlib.sha256(text + constants).digest(), world), error)


class HasWorld(Protocol):
    """What an agreement needs of a ``ParallelContext``."""

    @property
    def world(self) -> Comm: ...


class together(AbstractContextManager[None]):
    """A block of local work that may fail on some ranks. Then all ranks raise an error of the same type. A failed
    rank raises its own error. The others raise an error that names the first failed rank. The block may make no
    collective; its end is one, over the world."""

    # a class and not a generator: contextlib leaves a generator at different lines with and without an
    # error, so ranks would appear to make their collectives from different places

    def __init__(self, ctx: HasWorld) -> None:
        self._ctx = ctx

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BackendError) or not isinstance(error, Exception | None):
            return  # the ranks can no longer communicate, or this rank has to stop
        text = "" if error is None else f"{type(error).__module__}.{type(error).__qualname__}\n{error}"
        data = text[:_LIMIT].encode(errors="backslashreplace")  # file names may be invalid UTF-8
        texts = gather_bytes(data, self._ctx.world) if self._ctx.world.size > 1 else [data]
        if error is not None:
            return  # the with statement raises it again
        for rank, failure in enumerate(texts):
            if failure:
                name, _, message = failure.decode().partition("\n")
                raise _rebuilt(name, f"rank {rank}: {message}")


def _rebuilt(kind: str, message: str) -> Exception:
    """Another rank's error, of the same type if that type takes just a message, else a RuntimeError."""
    module, _, name = kind.rpartition(".")
    cls = getattr(errors if module == errors.__name__ else builtins, name, None)
    if not isinstance(cls, type) or not issubclass(cls, Exception) or name == "ExceptionGroup":
        return RuntimeError(f"{name}: {message}")
    return RuntimeError(f"{name}: {message}") if issubclass(cls, OSError | UnicodeError) else cls(message)
