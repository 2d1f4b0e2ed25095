"""What came of the comparison of a script, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FirstDifference:
    """What differs first. ``ranks``: those that have something else than they should."""

    module: str
    kind: str  # the module's class
    direction: str
    what: str
    step: int
    ranks: list[int]
    difference: float
    of: float  # the largest value of the whole
    values: str
    cause: str
    remedy: str


@dataclass
class ScriptVerdict:
    """``compared``: tensors that are the same, ``parts`` of them divided; ``apart``: those inside of modules that only
    one side has, or that are divided in ways with no part to compare."""

    ranks: int
    steps: int
    bits: bool
    compared: int = 0
    parts: int = 0
    apart: int = 0
    first: FirstDifference | None = None


def said(verdict: ScriptVerdict) -> str:
    """In some lines."""
    steps = f"{verdict.steps} step{'s' * (verdict.steps != 1)}"
    apart = f"; {verdict.apart} inside of modules have no counterpart" if verdict.apart else ""
    same = "bit for bit" if verdict.bits else "but for rounding"
    d = verdict.first
    if d is None:
        return (
            f"equal: {verdict.ranks} ranks compute what one process does, {same}, in {steps}: {verdict.compared} "
            f"tensors, {verdict.parts} of them in parts{apart}"
        )
    ranks = f"rank{'s' * (len(d.ranks) != 1)} {', '.join(map(str, d.ranks))}"
    return (
        f"DIFFERENT, first in {d.module}{d.kind and f' ({d.kind})'}, {d.direction}, step {d.step + 1}: {d.what}\n"
        f"  on {ranks}: by up to {d.difference:.3g} of {d.of:.3g}: {d.values}\n"
        f"  cause: {d.cause}\n"
        f"  remedy: {d.remedy}"
    )
