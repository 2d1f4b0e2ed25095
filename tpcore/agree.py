"""Errors that every rank raises together, so that no rank is left waiting for one that failed."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import errors
from .comm import Comm
from .context import ParallelContext
from .errors import BackendError

_LIMIT = 4096  # characters of a message that travel


def gather_bytes(data: bytes, comm: Comm) -> list[bytes]:
    """``data`` of every rank of the group, in group order."""
    device = comm.rank.device
    length = torch.tensor([len(data)], dtype=torch.int64).to(device)
    lengths = [int(n) for n in comm.all_gather(length, 0).tolist()]
    padded = torch.zeros((1, max(1, *lengths)), dtype=torch.uint8)
    padded[0, : len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    rows = comm.all_gather(padded.to(device), 0).cpu()
    return [bytes(row[:n].tolist()) for row, n in zip(rows, lengths, strict=True)]


@contextmanager
def together(ctx: ParallelContext) -> Iterator[None]:
    """Local work that may fail on some ranks: then all raise, after the block, an error of the same type.

    A rank that failed raises its own error; the others one that names the first rank that did. No
    collective may be made inside. Collective over the world.
    """
    error: Exception | None = None
    try:
        yield
    except BackendError:
        raise  # the ranks can no longer talk
    except Exception as e:  # noqa: BLE001  raised again below, on every rank
        error = e
    said = "" if error is None else f"{type(error).__module__}.{type(error).__qualname__}\n{error}"
    heard = gather_bytes(said[:_LIMIT].encode(), ctx.world) if ctx.world.size > 1 else [said.encode()]
    if error is not None:
        raise error
    for rank, text in enumerate(heard):
        if text:
            kind, _, message = text.decode().partition("\n")
            raise _rebuilt(kind, f"rank {rank}: {message}")


def _rebuilt(kind: str, message: str) -> Exception:
    """The error type that another rank raised, where it is one that takes a message; else RuntimeError."""
    module, _, name = kind.rpartition(".")
    found = getattr(errors if module == errors.__name__ else builtins, name, None)
    if (
        isinstance(found, type)
        and issubclass(found, Exception)
        and not issubclass(found, OSError | UnicodeError)
    ):
        return found(message)
    return RuntimeError(f"{name}: {message}")
