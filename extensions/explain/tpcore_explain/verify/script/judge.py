"""Which tensors of a training differ between one process and several ranks, and by how much they may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from .parts import NONE, SUM, WHOLE, Fit, fit
from .record import BACKWARD, FORWARD, GRADIENT, START, UPDATE, Trace, TraceEntry

_EXACT = 1e-9  # of float64, relative to the largest value: many thousand roundings of 1e-16, and no mistake
_UPDATE = 1e-6  # of an update: Adam divides by gradients that may be noise, down to its eps of 1e-8
_SMALL = 1e-2  # of the largest value of its kind: smaller tensors, as the gradient of a key's bias, may be noise alone
_FEW = 8  # entries, of which one sample of noise may by chance say that there is none
_LAST_BITS = 16  # of the largest value: what another order of addition changes
_NOISE = 4.0  # times what rounding changes in one process: sums over ranks round once more, and noise is a sample


@dataclass
class Judged:
    """One tensor. ``mine``: of the ranks that have it, by rank; ``scale``: of gradients, if losses are means of parts
    of the batch."""

    entry: TraceEntry
    whole: Tensor
    mine: dict[int, Tensor]
    fit: Fit
    close: Callable[[Tensor, Tensor], bool]
    near: Callable[[Tensor, Tensor], bool]  # as close, but for rounding
    missing: Sequence[int] = ()

    @property
    def wrong(self) -> bool:
        # parameters and what belongs to them must be there as they are, and what a step begins with
        strict = self.entry.direction in (START, GRADIENT, UPDATE)
        return self.fit.kind == NONE or bool(self.missing) or (strict and self.fit.kind == SUM)


class Judge:
    """Compares the traces of ``ranks`` with that of one process ``alone``, in float64 or, with that of a ``noisy`` one,
    as far as rounding explains; with ``bits`` not even that."""

    def __init__(self, alone: Trace, ranks: Sequence[Trace], noisy: Trace | None, bits: bool) -> None:
        self.alone, self.ranks, self.noisy, self.bits = alone, ranks, noisy, bits
        self._factors = [n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]
        self._largest: dict[str, float] = {}
        moved: dict[str, list[float]] = {}
        for entry in alone.entries:
            value, kind = self._value(alone, entry), entry.direction
            self._largest[kind] = max(self._largest.get(kind, 0.0), largest(value))
            if noisy is not None and largest(value) and entry in noisy.entries:
                moved.setdefault(kind, []).append(self._moved(entry, value) / largest(value))
        self._usual = {kind: median(shares) for kind, shares in moved.items()}
        firsts = {e.step: e for e in reversed(alone.entries) if e.direction == FORWARD}
        self._runs = [{step: self._run(t, e) for step, e in firsts.items()} for t in ranks]

    def _value(self, trace: Trace, entry: TraceEntry) -> Tensor:
        """Of an update in float64 only what it adds: a parameter hardly changes by one."""
        value = trace.entries[entry]
        if entry.direction != UPDATE or self.bits or self.noisy is not None:
            return value
        before = self._before(trace, entry)
        return value if before is None else value - before

    def stays(self, trace: Trace, entry: TraceEntry) -> bool:
        """Whether a step left the parameter as it was."""
        before = self._before(trace, entry)
        return before is not None and torch.equal(trace.entries[entry], before)

    def _before(self, trace: Trace, entry: TraceEntry) -> Tensor | None:
        before = trace.entries.get(entry._replace(step=entry.step - 1))
        if before is None:
            before = next((v for e, v in trace.entries.items() if e.direction == START and e[2:4] == entry[2:4]), None)
        return before

    def _moved(self, entry: TraceEntry, value: Tensor) -> float:
        """By rounding; of a gradient of few entries as much as of others in its module."""
        if value.numel() >= _FEW or not (entry.direction == GRADIENT or entry.what.startswith("parameter")):
            return self._moved_itself(entry, value)
        near = [e for e in self.alone.entries if e[:3] == entry[:3]]
        parts = [e for e in near if entry.direction == GRADIENT or e.what.startswith("parameter")]
        return max(self._moved_itself(e, self._value(self.alone, e)) for e in parts)

    def _moved_itself(self, entry: TraceEntry, value: Tensor) -> float:
        other = None if self.noisy is None else self.noisy.entries.get(entry)
        return largest(value.double() - other.double()) if other is not None and other.shape == value.shape else 0.0

    def _sure(self, entry: TraceEntry, value: Tensor) -> Tensor:
        """An updated parameter without the entries whose gradients, up to this step, are of the size of rounding: an
        optimizer that divides by them steps to either side."""
        value = value.clone()
        for step in range(entry.step + 1):
            first = TraceEntry(step, BACKWARD, entry.module, f"parameter {entry.what}")
            for e in self.alone.calls.get(first, []):
                grad = self.alone.entries[e]
                value[grad.abs() <= self._allowed(e, grad)] = torch.nan
        return value

    def _allowed(self, entry: TraceEntry, value: Tensor) -> float:
        if entry.direction == UPDATE and self.noisy is not None:  # a step that is more right than none
            before = self.alone.entries.get(TraceEntry(0, START, entry.module, entry.what))
            return 0.75 * largest(value - before) if before is not None else torch.inf
        size = max(largest(value), _SMALL * self._largest[entry.direction])
        if self.bits:  # of what ranks add in another order
            bits = _LAST_BITS * torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
            return max(_EXACT, bits) * size
        if self.noisy is None:
            return (_UPDATE if entry.direction == UPDATE else _EXACT) * size
        return _NOISE * max(self._moved(entry, value), self._usual.get(entry.direction, 0.0) * size)

    def judge(self, entry: TraceEntry, scale: dict[int, float] | None = None) -> Judged | None:
        """None where there is nothing to compare: a module of one side only, or with a shape that is no part.
        ``scale``: by which that of each rank is divided."""
        whole = self._value(self.alone, entry)
        calls = [self._call(r, entry, whole) for r in range(len(self.ranks))]
        mine = {r: self._value(t, e) for r, (t, e) in enumerate(zip(self.ranks, calls, strict=True)) if e in t.entries}
        mine = {r: t / scale[r] if scale and r in scale else t for r, t in mine.items()}
        allowed = self._allowed(entry, whole)

        any_number = entry.direction == UPDATE and self.noisy is not None and not self.bits
        whole = self._sure(entry, whole) if any_number else whole

        def near(a: Tensor, b: Tensor) -> bool:
            if a.shape != b.shape or not a.is_floating_point():
                return torch.equal(a, b)
            a = a.masked_fill(b.isnan(), torch.nan) if any_number else a
            return torch.allclose(a.double(), b.double(), rtol=0, atol=allowed, equal_nan=True)

        close = torch.equal if self.bits and not scale else near  # a quotient rounds
        if not mine and entry.direction in (FORWARD, BACKWARD) and entry.what != "loss":
            return None
        missing = self._missing(entry, mine)
        some = len(mine) < len(self.ranks)
        if not mine:
            found = Fit(NONE)
        elif entry.what == "mask":
            found = _masks(whole, list(mine.values()))
        elif whole.is_floating_point() and (entry.direction == BACKWARD or (entry.what == "loss" and some)):
            found = self._scaled(whole, list(mine.values()), close, near)
        else:
            found = fit(whole, list(mine.values()), close, near)
            if found.kind == NONE and self._bias_on_each(entry, whole, list(mine.values()), near):
                found = Fit(SUM, found.blocks)
        judged = Judged(entry, whole, mine, found, close, near, missing)
        return None if found.kind == NONE and not found.blocks and not self.must_be_there(entry) else judged

    def must_be_there(self, entry: TraceEntry) -> bool:
        """Parameters, losses, and what whole models take and give."""
        top = entry.direction == FORWARD and ("." not in entry.module or entry.what == "mask")
        return top or entry.direction in (START, GRADIENT, UPDATE)

    def _run(self, trace: Trace, first: TraceEntry) -> int:
        """Of the microbatches of one process, in runs as long as this rank's: the number of its own."""
        every, mine = self.alone.calls[first], trace.calls.get(first, [])
        starts = [self.alone.entries[e] for e in every[:: len(mine) or len(every)]]
        return next((i for i, value in enumerate(starts) if mine and torch.equal(value, trace.entries[first])), 0)

    def _call(self, rank: int, entry: TraceEntry, whole: Tensor) -> TraceEntry:
        """The call of ``rank`` that is this one, or a number that it has not. Of a module that is called more often, as
        a stage of a pipeline in ticks without a microbatch, the one with the nearest numbers."""
        trace = self.ranks[rank]
        calls, every = trace.calls.get(entry._replace(call=0), []), self.alone.calls[entry._replace(call=0)]
        if len(calls) < len(every):
            return entry._replace(call=entry.call - self._runs[rank].get(entry.step, 0) * len(calls))
        if len(calls) == len(every):
            return entry
        alike = [e for e in calls if trace.entries[e].shape == whole.shape]
        return min(alike, key=lambda e: largest(trace.entries[e].double() - whole.double()), default=entry)

    def _bias_on_each(self, entry: TraceEntry, whole: Tensor, mine: list[Tensor], near: Callable[..., bool]) -> bool:
        """Whether it is a sum that ranks have not added up, and each has its bias already."""
        bias = self.alone.entries.get(TraceEntry(entry.step - 1, UPDATE, entry.module, "bias"))
        bias = self.alone.entries.get(TraceEntry(0, START, entry.module, "bias")) if bias is None else bias
        if bias is None or not entry.what.startswith("output") or whole.shape[-1:] != bias.shape:
            return False
        return any(m.shape[-1:] == bias.shape for m in mine) and (
            fit(whole - bias, [m - bias for m in mine if m.shape[-1:] == bias.shape], near, near).kind == SUM
        )

    def _missing(self, entry: TraceEntry, mine: dict[int, Tensor]) -> list[int]:
        if entry.direction != GRADIENT:
            return []
        own = {e[2:4] for e in self.alone.entries if e.direction == START}
        holds = [
            r
            for r, t in enumerate(self.ranks)
            if entry[2:4] in own and any(e.direction == START and e[2:4] == entry[2:4] for e in t.entries)
        ]
        return [r for r in holds if r not in mine]

    def _scaled(self, whole: Tensor, mine: list[Tensor], close: Callable[..., bool], near: Callable[..., bool]) -> Fit:
        """Ranks with other examples each take the mean loss of theirs: all their gradients, and losses of as many fewer
        microbatches, are as many times larger as there are parts of the batch, until the mean over ranks."""
        fits = {n: fit(whole * n, mine, near, near) for n in self._factors}
        self._factors = [n for n, f in fits.items() if f.kind != NONE] or self._factors
        first = self._factors[0]
        return fits[first] if close is near else fit(whole * first, mine, close, near)


def _masks(whole: Tensor, ranks: list[Tensor]) -> Fit:
    """Of dropout, of which no draw is that of one process: ranks that all have the activation drop the same."""
    same = any(r.shape != whole.shape for r in ranks) or all(torch.equal(r, ranks[0]) for r in ranks)
    return Fit(WHOLE) if same else Fit(NONE, [ranks[0]] * len(ranks))


def largest(value: Tensor) -> float:
    """The largest finite value without its sign."""
    if not value.numel() or value.is_complex():
        return 0.0
    return float(value.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().max())
