"""Errors that every rank raises together, so that no rank is left waiting for one that failed."""

from __future__ import annotations

import builtins
import hashlib
from contextlib import AbstractContextManager
from difflib import unified_diff

import torch

from . import errors
from .comm import Comm
from .context import ParallelContext
from .errors import BackendError

_LEAST = 64  # bytes of a message where a program is compiled for each length
_LINES = 12  # differing lines that are shown
_LIMIT = 4096  # characters of a message that travel


def gather_bytes(data: bytes, comm: Comm) -> list[bytes]:
    """``data`` of every rank of the group, in group order."""
    device = comm.position.device
    length = torch.tensor([len(data)], dtype=torch.int64).to(device)
    lengths = [int(n) for n in comm.all_gather(length, 0).tolist()]
    room = max(1, *lengths)
    if not comm.eager:  # every length would be a program of its own to compile
        room = max(_LEAST, 1 << (room - 1).bit_length())
    padded = torch.zeros((1, room), dtype=torch.uint8)
    padded[0, : len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    rows = comm.all_gather(padded.to(device), 0).cpu()
    return [bytes(row[:n].tolist()) for row, n in zip(rows, lengths, strict=True)]


def check_one_program(text: bytes, constants: bytes, world: Comm) -> None:
    """Raise BackendError on all ranks if they have traced different programs, for the first's is what all
    will run. ``text``: the program in lines, of which those that differ are shown."""
    digests = gather_bytes(hashlib.sha256(text + constants).digest(), world)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    texts = gather_bytes(text, world)
    mine, theirs = (t.decode().splitlines() for t in (texts[0], texts[other]))
    lines = [line for line in unified_diff(mine, theirs, lineterm="", n=0) if line[0] in "+-"][2:]
    shown = "\n".join(line[:200] for line in lines[:_LINES])
    raise BackendError(
        f"ranks 0 and {other} would need different programs, so that one could not serve all: something in "
        "the model's forward depends on the rank as a Python number, or is a tensor that is no buffer\n"
        f"{shown or 'their constants differ'}"
    )


class together(AbstractContextManager[None]):
    """Local work that may fail on some ranks: then all raise, after the block, an error of the same type.

    A rank that failed raises its own error; the others one that names the first rank that did. No
    collective may be made inside. Collective over the world.
    """

    # a class and not a generator: contextlib would leave a generator from one line after an error and from
    # another without, and ranks would seem to make their collectives from different places

    def __init__(self, ctx: ParallelContext) -> None:
        self._ctx = ctx

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BackendError) or not isinstance(error, Exception | None):
            return  # the ranks can no longer talk, or this one is asked to stop
        text = "" if error is None else f"{type(error).__module__}.{type(error).__qualname__}\n{error}"
        data = text[:_LIMIT].encode(errors="backslashreplace")  # file names may hold what UTF-8 cannot
        texts = gather_bytes(data, self._ctx.world) if self._ctx.world.size > 1 else [data]
        if error is not None:
            return  # raised again by the with statement
        for rank, theirs in enumerate(texts):
            if theirs:
                name, _, message = theirs.decode().partition("\n")
                raise _rebuilt(name, f"rank {rank}: {message}")


def _rebuilt(kind: str, message: str) -> Exception:
    """The error type that another rank raised, where it is one that takes a message; else RuntimeError."""
    module, _, name = kind.rpartition(".")
    found = getattr(errors if module == errors.__name__ else builtins, name, None)
    if (
        isinstance(found, type)
        and issubclass(found, Exception)
        and not issubclass(found, OSError | UnicodeError)
        and found.__name__ != "ExceptionGroup"
    ):
        return found(message)
    return RuntimeError(f"{name}: {message}")
