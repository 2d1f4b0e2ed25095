"""The first module in which ranks compute something else than one process does, and the usual causes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .causes import CAUSES
from .judge import Judge, Judged, largest
from .parts import NONE, PART, SUM
from .record import BACKWARD, FORWARD, GRADIENT, START, UPDATE, Trace, TraceEntry
from .verdict import FirstDifference, ScriptVerdict

_WORDS = {
    START: "before the first step",
    FORWARD: "forward",
    BACKWARD: "backward",
    GRADIENT: "backward",
    UPDATE: "optimizer",
}


def first_difference(
    alone: Trace, ranks: Sequence[Trace], noisy: Trace | None = None, *, bits: bool = False
) -> ScriptVerdict:
    """Compare ``ranks`` with one process ``alone``. ``noisy``: one process with rounding errors added, whose distance
    to ``alone`` says how far ranks may be; without it all are in float64. ``bits``: they may not differ at all."""
    judge = Judge(alone, ranks, noisy, bits or (alone.exact and noisy is None))
    seen = _Seen(judge)
    verdict = ScriptVerdict(len(ranks), 1 + max((e.step for e in alone.entries), default=-1), judge.bits)
    for judged in seen.all.values():
        verdict.compared += judged is not None and not judged.wrong
        verdict.parts += judged is not None and judged.fit.kind == PART
        verdict.apart += judged is None
    wrong = seen.first()
    if wrong is not None:
        verdict.first = seen.explained(wrong)
    return verdict


class _Seen:
    """All tensors, judged, and how they hang together."""

    def __init__(self, judge: Judge) -> None:
        self.alone, self.judge = judge.alone, judge
        self.all = {entry: judge.judge(entry) for entry in judge.alone.entries}
        if any(trace.delegated for trace in judge.ranks):  # gradients are whatever its optimizer reduces by itself
            self.all = {e: None if e.direction == GRADIENT and j and j.wrong else j for e, j in self.all.items()}
        for step in {e.step for e in self.all}:
            self._unclip([j for e, j in self.all.items() if j and e.step == step and e.direction == GRADIENT])

    def _unclip(self, gradients: list[Judged]) -> None:
        """One wrong gradient changes the norm by which all are clipped, on one rank or on all: where most differ by one
        factor, those that differ by more than it are what is wrong."""
        factors: dict[int, list[float]] = {}
        for j in gradients:
            for rank, factor in zip(j.mine, _factors(j), strict=False):
                factors.setdefault(rank, []).append(0.0 if factor is None else round(factor, 4))
        usual = {rank: max(found, key=found.count) for rank, found in factors.items()}
        if all(f in (0.0, 1.0) for f in usual.values()) or any(
            2 * factors[rank].count(f) < len(gradients) for rank, f in usual.items()
        ):
            return
        # as exactly as the least changed one says
        again = {j.entry: self.judge.judge(j.entry, self._exact(gradients, usual)) for j in gradients}
        if any(j is not None and j.wrong for j in again.values()):
            self.all |= again

    def _exact(self, gradients: list[Judged], usual: dict[int, float]) -> dict[int, float]:
        found: dict[int, float] = {}
        for j in gradients:
            for rank, factor in zip(j.mine, _factors(j), strict=False):
                if factor is not None and round(factor, 4) == usual[rank]:
                    found.setdefault(rank, factor)
        return found

    def first(self) -> Judged | None:
        """The first that is wrong and stays so; None if nothing is wrong that matters."""
        wrong = [j for j in self.all.values() if j is not None and j.wrong]
        if not any(self.judge.must_be_there(j.entry) for j in wrong):
            return None
        return next((j for j in wrong if not self._heals(j.entry)), wrong[0])

    def _heals(self, entry: TraceEntry) -> bool:
        """What a module computes otherwise inside, and gives as it should: parts in an order of its own, say."""
        if entry.direction != FORWARD or not entry.module:
            return False
        above = [entry.module] if entry.what.startswith("input") else []
        path = entry.module
        while "." in path:
            path = path.rpartition(".")[0]
            above.append(path)
        outputs = [self.all.get(TraceEntry(entry.step, FORWARD, path, "output 0", entry.call)) for path in above]
        return any(j is not None and not j.wrong for j in outputs)

    # -- where it begins
    def _origin(self, judged: Judged) -> Judged:
        """Where what each rank has of a sum, not reduced, comes from: only later does it mix with what is whole."""
        entry = judged.entry
        if entry.direction == FORWARD and judged.fit.kind == NONE:
            before = [j for e, j in self._before(entry) if j is not None and e.what.startswith("output")]
            run = judged
            for j in reversed(before):
                if j.fit.kind != SUM:
                    break
                run = j
            return run
        start: Judged | None = judged
        if entry.direction == GRADIENT:  # of a module that gets such gradients
            at = entry.step, entry.module
            start = next((j for j in self._sums("output") if (j.entry.step, j.entry.module) == at), None)
        elif judged.fit.kind == NONE:  # it is the sum of such gradients and of whole ones
            start = next((j for j in self._taken(entry)), None)
        found, walked = start or judged, set()
        while start is not None and start.entry not in walked:
            found = start
            walked.add(start.entry)
            start = self._later(start.entry)
        return found

    def _before(self, entry: TraceEntry) -> list[tuple[TraceEntry, Judged | None]]:
        entries = list(self.all)
        return [(e, self.all[e]) for e in entries[: entries.index(entry)] if e[:2] == entry[:2]]

    def _sums(self, what: str) -> list[Judged]:
        return [
            j
            for e, j in self.all.items()
            if j is not None and e.direction == BACKWARD and e.what.startswith(what) and j.fit.kind == SUM
        ]

    def _later(self, entry: TraceEntry) -> Judged | None:
        """Of gradients that are such sums: the one that this comes from, of what is later in forward."""
        if entry.what.startswith("output"):
            return next((j for j in self._taken(entry)), None)
        same = (entry.step, entry.module, entry.call)
        return next((j for j in self._sums("output") if (j.entry.step, j.entry.module, j.entry.call) == same), None)

    def _taken(self, entry: TraceEntry) -> list[Judged]:
        """The modules, the innermost first, that take this tensor and give such a sum as its gradient."""
        mine = self.alone.entries.get(entry._replace(direction=FORWARD))
        takes = (j for j in self._sums("input") if j.entry.step == entry.step and j.entry != entry)
        return [] if mine is None else [j for j in takes if self._is(j.entry._replace(direction=FORWARD), mine)]

    def _is(self, entry: TraceEntry, value: Tensor) -> bool:
        other = self.alone.entries.get(entry)
        return other is not None and other.shape == value.shape and torch.equal(other, value)

    # -- what it says
    def explained(self, wrong: Judged) -> FirstDifference:
        origin = self._origin(wrong)
        entry = origin.entry
        module = self._named(origin)
        cause, remedy = self._cause(origin, module)
        ranks, error, values = _apart(origin)
        return FirstDifference(
            module or "the loss",
            self.alone.classes.get(module, ""),
            _WORDS[BACKWARD if self._again(entry) else entry.direction],
            _what(entry, module),
            entry.step,
            ranks,
            error,
            largest(origin.whole),
            values,
            cause,
            remedy,
        )

    def _named(self, origin: Judged) -> str:
        """The module whose code it is: what a module takes comes from the one around it."""
        entry = origin.entry
        outside = (FORWARD, "input") if entry.direction == FORWARD else (BACKWARD, "output")
        if (entry.direction, entry.what.split()[0]) != outside or origin.fit.kind == SUM or self._again(entry):
            return entry.module
        called = {e.module for e in self.all if e.direction == FORWARD}
        path = entry.module
        while "." in path:
            path = path.rpartition(".")[0]
            if path in called:
                return path
        return entry.module

    def _again(self, entry: TraceEntry) -> bool:
        """Whether backward computes it again: one process did with the same numbers as before."""
        value = self.alone.entries.get(entry._replace(call=0))
        return entry.direction == FORWARD and entry.call > 0 and value is not None and self._is(entry, value)

    def _cause(self, origin: Judged, module: str) -> tuple[str, str]:
        entry = origin.entry
        if self._again(entry):
            return CAUSES["again"]
        if entry.direction == START:
            return CAUSES["initial"]
        if entry.direction == FORWARD and "." not in entry.module and entry.what.startswith("input"):
            return CAUSES["batch"]
        if entry.what.startswith("mask"):
            return CAUSES["dropout"]
        if self.judge.bits and _rounds(origin):
            return CAUSES["order"]
        if entry.direction in (FORWARD, BACKWARD) and origin.fit.kind == SUM:
            return CAUSES["sum"] if entry.direction == FORWARD else CAUSES["sum backward"]
        scaled = _factor(origin) is not None
        if entry.direction == GRADIENT:
            if origin.missing:
                return CAUSES["none"]
            differ = origin.fit.kind == SUM or not _alike(origin)
            same = all(t.shape == origin.whole.shape for t in origin.mine.values())
            if differ and not scaled and None not in _factors(origin):
                return CAUSES["clipped"]
            return CAUSES["replicated" if differ and same else "scaled" if scaled else "gradient"]
        if entry.direction == UPDATE:
            still = any(self.judge.stays(self.judge.ranks[r], entry) for r in origin.mine)
            return CAUSES["still" if still and not self.judge.stays(self.alone, entry) else "optimizer"]
        if entry.direction == BACKWARD:
            own = "gradient" if entry.what.startswith("parameter") else "backward"
            return CAUSES["scaled" if scaled else own]
        inputs = [j for e, j in self.all.items() if e[:3] == entry[:3] and e.what.startswith("input") and j is not None]
        if any(entry.module in t.hooked for t in self.judge.ranks):
            return CAUSES["hook"]
        if any(j.fit.kind == PART for j in inputs) or module != entry.module:
            return CAUSES["part"]
        return CAUSES["scaled" if scaled else "forward"]


def _what(entry: TraceEntry, module: str) -> str:
    kind, _, number = entry.what.partition(" ")
    again = f" in its call {entry.call + 1} of this step" if entry.call else ""
    inside = f"{kind} {number} of {entry.module}" if module != entry.module else f"its {kind} {number}"
    if entry.direction in (START, UPDATE):
        return entry.what
    if entry.direction == GRADIENT:
        return f"the gradient of {entry.what}"
    if not number:
        return entry.what + again
    return (inside if entry.direction == FORWARD else f"the gradient of {inside}") + again


def _pairs(judged: Judged) -> list[tuple[int, Tensor, Tensor]]:
    blocks = judged.fit.blocks or [judged.whole] * len(judged.mine)
    return [(r, t, b) for (r, t), b in zip(judged.mine.items(), blocks, strict=True) if t.shape == b.shape]


def _apart(judged: Judged) -> tuple[list[int], float, str]:
    """The ranks that differ, the largest difference, and the values there."""
    if not judged.mine:
        return [], 0.0, "no rank has it"
    if judged.missing:
        return list(judged.missing), largest(judged.whole), "it is None there"
    pairs = _pairs(judged)
    if not pairs:
        shapes = ", ".join(str(tuple(t.shape)) for t in judged.mine.values())
        return sorted(judged.mine), 0.0, f"ranks have the shapes {shapes}, one process {tuple(judged.whole.shape)}"
    wrong = [(r, t, b) for r, t, b in pairs if not judged.close(t, b)] or pairs
    distance = [(t.double() - b.double()).abs().nan_to_num(float("inf")) for _, t, b in wrong]
    worst = max(range(len(wrong)), key=lambda i: float(distance[i].max()) if distance[i].numel() else 0.0)
    rank, mine, block = wrong[worst]
    at = [int(i) for i in torch.unravel_index(distance[worst].argmax(), distance[worst].shape)] if mine.ndim else []
    got, want = float(mine[tuple(at)]), float(block[tuple(at)])
    values = f"rank {rank} has {got:.6g} at {at} of what it holds, one process {want:.6g}"
    factor = _factor(judged)
    return (
        [r for r, _, _ in wrong],
        float(distance[worst].max()),
        values + (f"; all of it is {factor:.3g} times that" if factor is not None else ""),
    )


def _factors(judged: Judged) -> list[float | None]:
    """By which all that a rank has differs, rank by rank; None where it is no factor."""
    found: list[float | None] = []
    for _, t, b in _pairs(judged):
        mine, block = t.double(), b.double()
        ratio = float((mine * block).sum() / (block * block).sum().clamp_min(1e-300))
        alike = block.numel() > 1 and torch.allclose(mine, block * ratio, rtol=1e-3, atol=1e-6 * largest(block))
        found.append(ratio if alike else None)
    return found or [None]


def _factor(judged: Judged) -> float | None:
    """By which all that is wrong differs."""
    first, *others = _factors(judged)
    if first is None or abs(first - 1) < 1e-3 or any(o is None or abs(o - first) > 1e-3 for o in others):
        return None
    return first


def _rounds(judged: Judged) -> bool:
    """Whether all that differs, does so by a few of the last bits of large values."""
    pairs = _pairs(judged)
    return len(pairs) == len(judged.mine) > 0 and not judged.missing and all(judged.near(t, b) for _, t, b in pairs)


def _alike(judged: Judged) -> bool:
    values = list(judged.mine.values())
    return all(t.shape == values[0].shape and judged.near(t, values[0]) for t in values)
