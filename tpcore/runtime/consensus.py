"""Agreement of ranks: errors that all raise together, so that none waits for one that failed; checks of a run."""

from __future__ import annotations

import builtins
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import unified_diff
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from .. import errors
from ..comm.comm import Comm
from ..comm.parts import Mark, marked, plain
from ..comm.signature import call_site
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
    room = max(1, *lengths)
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


_MOST = 10_000  # notes kept between two comparisons; evaluation never compares
_CHUNKS = 16
_TOLERANCE = 1e-3  # relative, for a chunk's sum: ranks may round differently; other data differs by far more
_SAMPLE = 64
_OTHER = 0.1  # relative, in the 2-norm of a sample: independent data differ by 1.4, a flipped sign by 2
_GOLDEN = (math.sqrt(5) - 1) / 2

Note = tuple[str, list[float]]
"""What should be equal on all ranks of a tp group and where, and a digest of it."""


class Checks:
    """The checks of one rank. ``report`` receives each problem and may raise; None: no part is marked. ``running``:
    ranks run, and ``compare`` can be called; otherwise they are recorded, on tensors mostly without values."""

    def __init__(self, report: Callable[[str], None] | None, *, running: bool) -> None:
        self._report, self.running = report, running
        self.notes: list[Note] = []

    def __deepcopy__(self, memo: object) -> Checks:
        return self

    def part(self, y: Tensor, comm: Comm, dim: int, kind: str) -> Tensor:
        """Mark ``y`` as this rank's chunk along ``dim``. ``kind``: "features" or "tokens"."""
        if self._report is None or comm.size == 1 or torch.compiler.is_compiling():
            return y
        dim %= y.ndim
        return marked(plain(y), Mark(kind, dim, y.shape[dim], comm.size, self._report))

    def same(self, name: str, t: Tensor, at: str = "") -> None:
        """Note a digest of ``t``, which should be equal on all tp ranks. ``at``: where; by default the line
        outside of tpcore."""
        if not t.is_meta and len(self.notes) < _MOST and not torch.compiler.is_compiling():
            code, line = call_site()
            where = at or f"at {code.co_filename}:{line} in {code.co_name}"
            self.notes.append((f"{name} {where}", _digest(plain(t.detach()))))

    def compare(self, comm: Comm) -> None:
        """Report, on all ranks of ``comm``, the first note in which they differ. Collective."""
        notes, self.notes = self.notes, []
        if not self.running or comm.size == 1 or not comm.eager:
            return
        difference = first_difference(comm.transport.members, gather(notes, comm))
        if difference is not None and self._report is not None:
            self._report(difference)


class FirstCalls(Checks):
    """Of a layer that somebody's plan leaves in parts: in its first calls what surely takes a part for the whole is
    raised as a ValueError."""

    left = 512

    def __init__(self) -> None:
        super().__init__(_raise, running=True)

    def part(self, y: Tensor, comm: Comm, dim: int, kind: str) -> Tensor:
        if self.left <= 0 or comm.size == 1 or torch.compiler.is_compiling():
            return y
        self.left -= 1
        return marked(plain(y), Mark(kind, dim % y.ndim, y.shape[dim], comm.size, _raise, certain=True))

    def same(self, name: str, t: Tensor, at: str = "") -> None:
        """No other rank is asked."""


def first_difference(ranks: Sequence[int], notes_by_rank: Sequence[Sequence[Note]]) -> str | None:
    """A message about the first note in which ranks of one tp group differ; None if there is none."""
    for other, notes in zip(ranks[1:], notes_by_rank[1:], strict=True):
        for (name, here), (other_name, there) in zip(notes_by_rank[0], notes, strict=False):
            if name != other_name or not _alike(here, there):
                return (
                    f"ranks {ranks[0]} and {other} of one tp group differ in {name}"
                    + (f" (rank {other}: {other_name})" if name != other_name else "")
                    + ". The ranks of a tp group need the same batch and the same seed: the sampler "
                    "takes ctx.index(ctx.batch) of ctx.batch.size, and call tpcore.random.manual_seed alike on all"
                )
    return None


WHOLE_BATCH = (
    "gets the whole batch, its inputs and its labels, and draws the same random numbers outside of the layers; a "
    "sampler takes ctx.index(ctx.batch) of ctx.batch.size"
)
"""What ranks of one batch need."""


def compare_ranks(tensors: Mapping[str, Tensor], comm: Comm, pair: str, need: str) -> None:
    """Raise ValueError on all ranks of ``comm`` if ``tensors``, which each needs alike, differ. ``pair``: two of them,
    with places for their numbers. Collective."""
    gathered = gather([(name, _digest(plain(t.detach()))) for name, t in tensors.items()], comm)
    for other, notes in enumerate(gathered):
        names, first = ([name for name, _ in note] for note in (notes, gathered[0]))
        if names != first:
            raise ValueError(f"{pair.format(0, other)} have {', '.join(first)} and {', '.join(names)}: {need}")
        for (name, here), (_, there) in zip(gathered[0], notes, strict=True):
            if not _alike(here, there):
                raise ValueError(f"{pair.format(0, other)} differ in {name}: {need}")


def _digest(t: Tensor) -> list[float]:
    flat = t.reshape(-1)
    if not flat.is_floating_point():
        if flat.is_complex() or not flat.numel():
            return [float(flat.numel())]
        places = torch.arange(flat.numel(), device=flat.device) % 1009 + 1
        return [float(flat.numel()), float(int((flat.to(torch.int64) * places).sum()) % (1 << 52))]
    sums = [float(chunk.abs().sum(dtype=torch.float64)) for chunk in flat.chunk(_CHUNKS)]
    # a sample of places that depend on the size alone, without a period, so that no width of a row divides their
    # distances; four digits, which are short in JSON
    n = flat.numel()
    chosen = range(n) if n <= _SAMPLE else [int(i * _GOLDEN % 1 * n) for i in range(_SAMPLE)]
    sample = flat[torch.tensor(chosen, dtype=torch.int64, device=flat.device)].double().tolist()
    sample = [float(f"{x:.4g}") if math.isfinite(x) else 0.0 for x in sample]
    return [float(n), *(s if math.isfinite(s) else -1.0 for s in sums), *sample]


def _alike(a: list[float], b: list[float]) -> bool:
    if len(a) != len(b) or a[0] != b[0]:
        return False
    if len(a) == 2 or not a[0]:  # integers, or nothing
        return a == b
    size = min(_SAMPLE, int(a[0]))
    sums, others = a[1:-size], b[1:-size]
    # of n entries that are rounded to bfloat16 by themselves the sum changes by 1/sqrt(n) of one's rounding
    most = _TOLERANCE + 2.0**-7 / math.sqrt(max(1.0, a[0] / _CHUNKS))
    if any(abs(x - y) > most * max(abs(x), abs(y)) for x, y in zip(sums, others, strict=True)):
        return False
    # of an entry that is rounding alone, as where equal values were subtracted, all digits may differ
    noise = _TOLERANCE * max(0.0, sum(sums)) / a[0] * math.sqrt(size)
    return math.dist(a[-size:], b[-size:]) <= _OTHER * math.hypot(*a[-size:]) + noise


def in_eager_mode() -> AbstractContextManager[Any]:
    """torch.compile runs functions as they are: compiled code has no operations that a check could see."""
    return cast(AbstractContextManager[Any], torch.compiler.set_stance("force_eager"))


def raising() -> Checks:
    """Checks for a run: each problem is raised as a ValueError."""

    return Checks(_raise, running=True)


def _raise(problem: str) -> None:
    raise ValueError(problem)
