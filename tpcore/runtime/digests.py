"""Digests of values that ranks need alike: other data is told apart, another rounding of the same data is not."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..comm.mappings import transformed
from ..comm.signature import ALL, checked_calls
from ..private import plain_functions, recorded
from .consensus import gather

_CHUNKS = 16
_TOLERANCE = 1e-3  # relative, for a chunk's sum: ranks may round differently; other data differs by far more
_SAMPLE = 64
_OTHER = 0.1  # relative, in the 2-norm of a sample: independent data differ by 1.4, a flipped sign by 2
_GOLDEN = (math.sqrt(5) - 1) / 2
_PERIOD = 1009
_PIECE = _PERIOD << 10  # whole numbers that are int64 at a time: a mask may have one for each pair of tokens
_FIRST = 2
_SHOWN = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What holds the bits of a number of so many bytes."""
_WHOLE = frozenset({torch.bool, torch.int8, *_BITS.values()})

Note = tuple[str, list[float]]
"""What should be equal on several ranks, and a digest of it."""

WHOLE_BATCH = (
    "gets the whole batch, its inputs and its labels, and draws the same random numbers outside of the layers; a "
    "sampler takes ctx.index(ctx.batch) of ctx.batch.size"
)
"""What ranks of one batch need."""


def compare_inputs(tensors: Mapping[str, Tensor], comm: Comm, whose: Hashable) -> None:
    """``compare_ranks`` of what the ranks of a tp group get from their programs, in the first calls of each kind, in a
    checked run in all. ``whose``: what is called, a number of it on ``comm``. Collective."""
    if are_compared(tensors, comm, whose):
        need = f"every rank of a tp group {WHOLE_BATCH}, and not the numbers of a process in the world"
        compare_ranks(tensors, comm, "ranks {} and {} of one tp group", need)


def are_compared(tensors: Mapping[str, Tensor], comm: Comm, whose: Hashable) -> bool:
    """Whether this call is one of the first of its kind, whose ``tensors`` ranks compare; it is counted."""
    if comm.size == 1 or torch.compiler.is_compiling() or transformed():
        return False  # what follows would be a guard of the graph
    most, kind = checked_calls(), (whose, torch.is_grad_enabled(), *tensors)
    if comm.compared[kind] >= (most if most == ALL else min(most, _FIRST)) or not are_read(tensors, comm):
        return False
    comm.compared[kind] += 1
    return True


def are_read(tensors: Mapping[str, Tensor], comm: Comm) -> bool:
    """Whether the ranks of ``comm`` can compare ``tensors``: a graph that is made now would keep the comparison, and a
    lazy backend would run a program for each value."""
    return comm.eager and not (torch.compiler.is_compiling() or recorded(*tensors.values()))


def compare_ranks(tensors: Mapping[str, Tensor], comm: Comm, pair: str, need: str) -> None:
    """Raise ValueError on all ranks of ``comm`` if ``tensors``, which each needs alike, differ. ``pair``: two of them,
    with places for their numbers. Collective."""
    notes = [(", ".join(tensors), [0.0]), *((name, digest(t)) for name, t in tensors.items())]
    different = first_difference(gather(notes, comm))
    if different is not None:
        other, name, other_name = different
        if name != other_name:
            raise ValueError(f"{pair.format(0, other)} have {name} and {other_name}: {need}")
        values = gather(_shown(tensors[name]) if name in tensors else "", comm)  # a third rank may have others
        raise ValueError(f"{pair.format(0, other)} differ in {name}: {need} ({values[0]}; {values[other]})")


def _shown(t: Tensor) -> str:
    with plain_functions():
        flat = _numbers(t)[:_SHOWN].tolist()
    more = ", ..." if t.numel() > _SHOWN else ""
    return f"{list(t.shape)} of {', '.join(f'{x:.4g}' if isinstance(x, float) else str(x) for x in flat)}{more}"


def first_difference(notes_by_rank: Sequence[Sequence[Note]]) -> tuple[int, str, str] | None:
    """The number of a rank that differs from the first, and the names of their first notes that do; None if none is."""
    for other, notes in enumerate(notes_by_rank):
        for (name, here), (other_name, there) in zip(notes_by_rank[0], notes, strict=False):
            if name != other_name or not _alike(here, there):
                return other, name, other_name
    return None


def digest(t: Tensor) -> list[float]:
    """Numbers of a tensor's size, of its sums and of some of its entries."""
    with plain_functions():  # not those of the tensor's class
        return _digest(_numbers(t))


def _numbers(t: Tensor) -> Tensor:
    """What can be compared of ``t``, flat: its bits where its dtype has no arithmetic, nothing of a tensor that has no
    memory of its own."""
    if t.layout is not torch.strided or t.is_nested or not _has_memory(type(t)):
        return torch.zeros(0, device="cpu")
    t = t.detach().int_repr() if t.is_quantized else t.detach()
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    known = t.dtype in _WHOLE or (t.is_floating_point() and t.element_size() > 1)
    return (t if known else t.view(_BITS[t.element_size()])).reshape(-1)


def _has_memory(kind: type[Tensor]) -> bool:
    """Whether tensors of this class are plain ones to torch's kernels, or say that they are: others wrap several."""
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__ or getattr(kind, "tpcore_plain", False)


def _digest(flat: Tensor) -> list[float]:
    if not flat.is_floating_point():
        if not flat.numel():
            return [0.0]
        flat = flat.cpu()  # a device may count in 32 bits alone
        places = torch.arange(min(_PIECE, flat.numel()), device="cpu") % _PERIOD + 1
        total = sum(int((part.to(torch.int64) * places[: len(part)]).sum()) for part in flat.split(_PIECE))
        return [float(flat.numel()), float(total % (1 << 52))]
    sums = [float(chunk.abs().sum(dtype=torch.float64)) for chunk in flat.chunk(_CHUNKS)]
    # a sample of places that depend on the size alone, without a period, so that no width of a row divides their
    # distances; four digits, which are short in JSON
    n = flat.numel()
    chosen = range(n) if n <= _SAMPLE else [int(i * _GOLDEN % 1 * n) for i in range(_SAMPLE)]
    sample = flat[torch.tensor(chosen, dtype=torch.int64, device=flat.device)].double().tolist()
    rounded = (float(f"{x:.4g}") for x in sample)  # the largest numbers become infinite by it
    sample = [x if math.isfinite(x) else 0.0 for x in rounded]
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
